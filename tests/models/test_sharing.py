"""Folders that are shared with their code: Transformers copies it, and it runs where the package is not installed."""

import json
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from test_loading import authors_config
from tiny_models import tiny_config, tiny_model
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_relative_import_files

import dcformer
from dcformer import DCFormerConfig, DCFormerForCausalLM


PACKAGE = Path(dcformer.__file__).parent
IDS, IMAGE = torch.arange(20)[None] % 67, torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
# Everything that a stranger does, in one process, since starting one takes seconds.
STRANGER = """
import importlib.util, json, sys
from pathlib import Path
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

assert importlib.util.find_spec("dcformer") is None, "the package is there after all"
results = {}
for folder in map(Path, sys.argv[1:]):
    auto_class = getattr(transformers, folder.name.partition("-")[0])
    model = auto_class.from_pretrained(folder, trust_remote_code=True).eval()
    for thing in (model, model.config):
        assert type(thing).__module__.startswith("transformers_modules."), folder
    inputs = torch.load(folder / "inputs.pt")
    torch.save(model(inputs)[0].detach(), folder / "output.pt")
    if auto_class is transformers.AutoModelForCausalLM:
        results[folder.name] = model.generate(inputs, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist()
        language_model, of_language_model = model, inputs
results["presets"] = type(language_model.config).presets()
results["names"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in ("dcformer", "dcpythia")]
auto_class = transformers.AutoModelForCausalLM
try:
    auto_class.from_pretrained(sys.argv[1], trust_remote_code=True, attn_implementation="sdpa")
except ValueError as error:
    results["sdpa"] = str(error)
language_model.save_pretrained("again")
reloaded = auto_class.from_pretrained("again", trust_remote_code=True).eval()
assert torch.equal(reloaded(of_language_model).logits, language_model(of_language_model).logits)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models by the folders where they were saved with their code, which are called like their Auto class."""
    root, made = tmp_path_factory.mktemp("shared"), {}
    image_config = dcformer.DCViTConfig(num_hidden_layers=1, image_size=32)
    for name, model in {
        "AutoModelForCausalLM-dcformer": tiny_model(),
        "AutoModelForCausalLM-dcpythia": tiny_model("dcpythia"),
        "AutoModel": dcformer.DCFormerModel(tiny_config()),
        "AutoModelForTokenClassification": dcformer.DCFormerForTokenClassification(tiny_config()),
        "AutoModelForImageClassification": dcformer.DCViTForImageClassification(image_config),
    }.items():
        made[root / name] = model.eval()
        classes = type(model.config), type(model)
        classes[0].register_for_auto_class()
        classes[1].register_for_auto_class(name.partition("-")[0])
        try:
            model.save_pretrained(root / name)
        finally:
            classes[0]._auto_class = classes[1]._auto_class = None
        torch.save(IMAGE if "Image" in name else IDS, root / name / "inputs.pt")
    first = next(iter(made))
    authors = shutil.copytree(first, root / "AutoModelForCausalLM-authors")
    auto_map = json.loads((first / "config.json").read_text())["auto_map"]
    values = authors_config(tiny_config(), auto_map=auto_map, bos_token_id=None, eos_token_id=None)
    (authors / "config.json").write_text(json.dumps(values))
    return made | {authors: made[first]}


def test_nine_files_travel_with_a_checkpoint(models):
    reached = {Path(file).name for file in get_relative_import_files(PACKAGE / "modeling_dcformer.py")}
    names = ("compose", "configuration", "hub", "inputs", "modeling", "plain", "types", "visibility")
    files = {"dcmha.py", *(f"{name}_dcformer.py" for name in names)}
    assert reached | {"modeling_dcformer.py"} == files
    assert {file.name for file in next(iter(models)).glob("*.py")} == files
    assert sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files) <= 2500


def test_a_folder_with_its_code_runs_without_the_package(models, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    inside = sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "venv")})
    # The .pth files over there, among them that of an editable package, count for nothing here.
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.__file__).parents[1])}
    (Path(inside) / "dependencies.pth").write_text("\n".join(sorted(folders)))
    environment = {"PATH": str(python.parent), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "stdin": subprocess.DEVNULL, "text": True, "cwd": tmp_path, "env": environment}
    run = subprocess.run([python, "-c", STRANGER, *models], **options)
    assert run.returncode == 0, run.stderr[-3000:]

    results = json.loads(run.stdout.splitlines()[-1])
    for folder, model in models.items():
        # Without the package attention runs in torch operators, with it in C++: in float32 both round differently.
        with torch.no_grad():
            expected = model(torch.load(folder / "inputs.pt"))[0]
        torch.testing.assert_close(torch.load(folder / "output.pt"), expected, rtol=1e-5, atol=1e-5)
        if folder.name in results:
            generated = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
            assert results[folder.name] == generated.tolist()
    assert len(results) == 3 + 3 and "sdpa" in results["sdpa"] and results["presets"] == DCFormerConfig.presets()
    assert results["names"] == ["DCFormerForCausalLM", "DCPythiaForCausalLM"]  # for Trainer's label smoothing
    copies = [{file.name for file in code.glob("*.py")} for code in (tmp_path / "again", next(iter(models)))]
    assert copies[0] == copies[1]


def test_the_package_loads_the_folder_with_its_own_classes_and_names_no_code_when_it_saves(models, tmp_path):
    shared = next(iter(models))
    assert "auto_map" in json.loads((shared / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(shared)
    assert type(model) is DCFormerForCausalLM
    model.save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert not list(tmp_path.glob("*.py"))
