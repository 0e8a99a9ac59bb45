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
from dcformer import DCFormerConfig, DCFormerForCausalLM, DCViTConfig


PACKAGE = Path(dcformer.__file__).parent
# Family and ending of the classes that are shared besides the language models.
HEADS = [
    ("DCFormer", "Model"),
    ("DCFormer", "ForSequenceClassification"),
    ("DCFormer", "ForTokenClassification"),
    ("DCFormer", "ForQuestionAnswering"),
    ("DCViT", "ForImageClassification"),
]
# Everything that a stranger does, in one process, since starting one takes seconds.
STRANGER = """
import importlib.util, json, sys
from pathlib import Path
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

assert importlib.util.find_spec("dcformer") is None, "the package is there after all"
shared, pythia, authors, again, *heads = map(Path, sys.argv[1:])
ids, results = torch.arange(20)[None] % 67, {}
for folder in (shared, pythia, authors):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    for thing in (model, model.config):
        assert type(thing).__module__.startswith("transformers_modules."), folder
    torch.save(model(ids).logits.detach(), folder / "logits.pt")
    results[folder.name] = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist()
results["presets"] = type(model.config).presets()
results["names"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in ("dcformer", "dcpythia")]
for folder in heads:
    head = getattr(transformers, folder.name).from_pretrained(folder, trust_remote_code=True).eval()
    assert type(head).__module__.startswith("transformers_modules."), folder
    inputs = torch.load(folder / "inputs.pt")
    torch.save(head(inputs)[0].detach(), folder / "output.pt")
try:
    AutoModelForCausalLM.from_pretrained(shared, trust_remote_code=True, attn_implementation="sdpa")
except ValueError as error:
    results["sdpa"] = str(error)
model.save_pretrained(again)
reloaded = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True).eval()
assert torch.equal(reloaded(ids).logits, model(ids).logits)
print(json.dumps(results))
"""


def save_with_code(model, folder, auto_class="AutoModelForCausalLM"):
    classes = type(model.config), type(model)
    classes[0].register_for_auto_class()
    classes[1].register_for_auto_class(auto_class)
    try:
        model.save_pretrained(folder)
    finally:
        classes[0]._auto_class = classes[1]._auto_class = None


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with models that were saved with their code."""
    root = tmp_path_factory.mktemp("shared")
    save_with_code(tiny_model(), root / "shared")
    save_with_code(tiny_model("dcpythia"), root / "pythia")
    shutil.copytree(root / "shared", root / "authors")
    auto_map = json.loads((root / "shared" / "config.json").read_text())["auto_map"]
    values = authors_config(tiny_config(), auto_map=auto_map, bos_token_id=None, eos_token_id=None)
    (root / "authors" / "config.json").write_text(json.dumps(values))
    return root


@pytest.fixture(scope="module")
def heads(root):
    """A folder for each Auto class, named like it, with a model that was saved with its code, and what it computes."""
    image, configs = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32), {"DCFormer": tiny_config()}
    configs["DCViT"] = DCViTConfig(num_hidden_layers=1, image_size=32)
    outputs = {}
    for family, head in HEADS:
        model = getattr(dcformer, f"{family}{head}")(configs[family]).eval()
        folder = root / f"AutoModel{head.removeprefix('Model')}"
        save_with_code(model, folder, folder.name)
        inputs = image if family == "DCViT" else torch.arange(20)[None]
        torch.save(inputs, folder / "inputs.pt")
        outputs[folder] = model(inputs)[0].detach()
    return outputs


def test_nine_files_travel_with_a_checkpoint(root):
    reached = {Path(file).name for file in get_relative_import_files(PACKAGE / "modeling_dcformer.py")}
    names = ("compose", "configuration", "hub", "inputs", "modeling", "plain", "types", "visibility")
    files = {"dcmha.py", *(f"{name}_dcformer.py" for name in names)}
    assert reached | {"modeling_dcformer.py"} == files
    assert {file.name for file in (root / "shared").glob("*.py")} == files
    assert sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files) <= 2500


def test_a_folder_with_its_code_runs_without_the_package(root, heads):
    venv.create(root / "venv", with_pip=False)
    python = root / "venv" / "bin" / "python"
    inside = sysconfig.get_path("purelib", "venv", {"base": str(root / "venv")})
    # The .pth files over there, among them that of an editable package, count for nothing here.
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.__file__).parents[1])}
    (Path(inside) / "dependencies.pth").write_text("\n".join(sorted(folders)))
    environment = {"PATH": str(python.parent), "HOME": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [python, "-c", STRANGER, *(str(root / name) for name in ("shared", "pythia", "authors", "again")), *heads]
    run = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True, cwd=root, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]

    results, ids = json.loads(run.stdout.splitlines()[-1]), torch.arange(20)[None] % 67
    for folder, variant in (("shared", "dcformer"), ("pythia", "dcpythia"), ("authors", "dcformer")):
        model = tiny_model(variant)
        # Without the package attention runs in torch operators, with it in C++: in float32 both round differently.
        with torch.no_grad():
            expected = model(ids).logits
        torch.testing.assert_close(torch.load(root / folder / "logits.pt"), expected, rtol=1e-5, atol=1e-5)
        generated = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert results[folder] == generated.tolist()
    assert results["presets"] == DCFormerConfig.presets()
    assert results["names"] == ["DCFormerForCausalLM", "DCPythiaForCausalLM"]  # for Trainer's label smoothing
    for folder, output in heads.items():
        torch.testing.assert_close(torch.load(folder / "output.pt"), output, rtol=1e-5, atol=1e-5)  # as above
    assert "sdpa" in results["sdpa"]
    assert {file.name for file in (root / "again").glob("*.py")} == {f.name for f in (root / "shared").glob("*.py")}


def test_the_package_loads_the_folder_with_its_own_classes_and_names_no_code_when_it_saves(root, tmp_path):
    assert "auto_map" in json.loads((root / "shared" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(root / "shared")
    assert type(model) is DCFormerForCausalLM
    model.save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert not list(tmp_path.glob("*.py"))
