"""Folders that are shared: with their code they load without the package; model cards; notes in headers; the Hub."""

import json
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from fake_hub import FakeHub
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import random_tokens, tiny_config, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPTNeoXTokenizer

import dcformer
from dcformer import DCFormerConfig, DCFormerModel, DCViTConfig, DCViTForImageClassification
from dcformer.model_card import is_untouched
from dcformer.sharing_dcformer import AUTO_CLASSES, read_header_notes


# Written by the authors' class, as far as it describes a model.
AUTHORS_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "block_size",
    "sliding_window": "window_size",
}

# Without the package attention runs in its plain form, with it in the C++ form: in float32 both round differently.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}

# Everything that a stranger does, in one process, since starting one takes seconds.
STRANGER = """
import importlib.util, json, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

assert importlib.util.find_spec("dcformer") is None, "the package is there after all"
shared, pythia, authors, again, images = map(Path, sys.argv[1:])
ids, found = torch.arange(20)[None] % 67, {}


def is_copied(thing):
    return type(thing).__module__.startswith("transformers_modules.")


for folder in (shared, pythia, authors):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert is_copied(model) and is_copied(model.config), folder
    torch.save(model(ids).logits.detach(), folder / "logits.pt")

config = AutoConfig.from_pretrained(shared, trust_remote_code=True)
found["presets"] = type(config).presets()
found["preset"] = type(config).from_preset("dcformer-405m").hidden_size
tokenizer = AutoTokenizer.from_pretrained(shared, trust_remote_code=True)
found["tokenizer"] = [type(tokenizer).__name__, tokenizer("b a")["input_ids"]]
model = AutoModelForCausalLM.from_pretrained(shared, trust_remote_code=True).eval()
found["generated"] = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist()
base = AutoModel.from_pretrained(shared, trust_remote_code=True).eval()
assert is_copied(base) and type(base).__name__ == "DCFormerModel"
torch.save(base(ids).last_hidden_state.detach(), shared / "hidden.pt")

classifier = AutoModelForImageClassification.from_pretrained(images, trust_remote_code=True).eval()
assert is_copied(classifier)
torch.save(classifier(torch.linspace(-1, 1, 192).view(1, 3, 8, 8)).logits.detach(), images / "logits.pt")

model.save_pretrained(again)
reloaded = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True).eval()
assert torch.equal(reloaded(ids).logits, model(ids).logits)
try:
    model.save_pretrained(again, with_code=False)
except ValueError as error:
    found["refusal"] = str(error)
print(json.dumps(found))
"""


def image_classifier() -> DCViTForImageClassification:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 24}
    return DCViTForImageClassification(DCViTConfig(**shape, image_size=8, patch_size=4, num_labels=3)).eval()


def auto_map_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "config.json").read_text()).get("auto_map", {})


def metadata(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.metadata()


def small_tokenizer(folder: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    GPTNeoXTokenizer(tokenizer_object=backend, unk_token="<unk>", pad_token=None).save_pretrained(folder)


def authors_folder(folder: Path, shared: Path) -> None:
    """The shared folder with a config.json as the authors write it, which keeps our auto_map."""
    shutil.copytree(shared, folder)
    values = json.loads((shared / "config.json").read_text())
    kept = ("vocab_size", "intermediate_size", "norm_eps", "model_type", "auto_map", "bos_token_id", "eos_token_id")
    renamed = {theirs: values[ours] for ours, theirs in AUTHORS_KEYS.items()}
    ours = {key: values.get(key) for key in kept}
    (folder / "config.json").write_text(json.dumps({**ours, **renamed, "use_qk_norm": True, "rope_base": 10000}))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """What a process found that has every dependency, but not the package; with the folders and models it was given."""
    root = tmp_path_factory.mktemp("stranger")
    folders = [root / name for name in ("shared", "pythia", "authors", "again", "images")]
    models_ = {"shared": tiny_model(), "pythia": tiny_model("dcpythia"), "images": image_classifier()}
    for name, model in models_.items():
        model.save_pretrained(root / name, with_code=True)
    small_tokenizer(root / "shared")
    authors_folder(root / "authors", root / "shared")

    venv.create(root / "venv", with_pip=False)
    python = root / "venv" / "bin" / "python"
    inside = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    ).stdout.strip()
    # The .pth files over there, among them that of an editable package, count for nothing here.
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.__file__).parents[1])}
    (Path(inside) / "dependencies.pth").write_text("\n".join(sorted(places)))
    environment = {
        "PATH": str(python.parent),
        "HOME": str(root),
        "HF_HOME": str(root / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, "-c", STRANGER, *map(str, folders)]
    run = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True, cwd=root, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1]), root, models_


def test_a_folder_with_its_code_loads_without_the_package(stranger):
    _, root, models_ = stranger
    ids = torch.arange(20)[None] % 67
    with torch.no_grad():
        for name in ("shared", "pythia"):
            torch.testing.assert_close(torch.load(root / name / "logits.pt"), models_[name](ids).logits, **ROUNDING)
        pixels = torch.linspace(-1, 1, 192).view(1, 3, 8, 8)
        logits = torch.load(root / "images" / "logits.pt")
        torch.testing.assert_close(logits, models_["images"](pixels).logits, **ROUNDING)
        hidden = torch.load(root / "shared" / "hidden.pt")
        torch.testing.assert_close(hidden, models_["shared"].model(ids).last_hidden_state, **ROUNDING)


def test_an_authors_configuration_with_our_auto_map_loads_without_the_package(stranger):
    _, root, models_ = stranger
    with torch.no_grad():
        expected = models_["shared"](torch.arange(20)[None] % 67).logits
    torch.testing.assert_close(torch.load(root / "authors" / "logits.pt"), expected, **ROUNDING)


def test_a_stranger_generates_the_same_tokens(stranger):
    found, _, models_ = stranger
    ids = torch.arange(20)[None] % 67
    expected = models_["shared"].generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert found["generated"] == expected.tolist()


def test_a_stranger_has_the_tokenizer_and_the_presets(stranger):
    found, _, _ = stranger
    assert found["tokenizer"] == ["GPTNeoXTokenizer", [1, 0]]
    assert found["presets"] == DCFormerConfig.presets() and found["preset"] == 1024


def test_what_a_stranger_saves_has_its_code_again(stranger):
    found, root, _ = stranger
    first, second = root / "shared", root / "again"
    assert auto_map_of(second) == auto_map_of(first)
    for file in first.glob("*.py"):
        assert (second / file.name).read_bytes() == file.read_bytes()
    assert "trust_remote_code=True" in (second / "README.md").read_text()
    assert "with_code=False is not possible" in found["refusal"]


@pytest.mark.parametrize("variant, prefix", [("dcformer", "DCFormer"), ("dcpythia", "DCPythia")])
def test_the_auto_map_names_every_class_there_is_and_no_other(variant, prefix, tmp_path):
    tiny_config(variant).save_pretrained(tmp_path, with_code=True)
    found = auto_map_of(tmp_path)
    modeling = dcformer.modeling_dcformer
    there = {auto: f"modeling_dcformer.{prefix}{end}" for end, (auto, _) in AUTO_CLASSES.items()}
    there = {auto: name for auto, name in there.items() if hasattr(modeling, name.split(".")[1])}
    assert found == {"AutoConfig": f"configuration_dcformer.{prefix}Config", **there}
    assert {"AutoModel", "AutoModelForCausalLM"} < set(found)
    for reference in found.values():
        file, name = reference.split(".")
        assert f"\nclass {name}(" in (tmp_path / f"{file}.py").read_text()


def test_code_goes_along_only_if_asked_or_if_it_came_along(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "with", with_code=True)
    model.save_pretrained(tmp_path / "without")
    assert auto_map_of(tmp_path / "without") == {} and not list((tmp_path / "without").glob("*.py"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "with")
    assert type(loaded) is type(model)  # the package's own, which needs no trust
    loaded.save_pretrained(tmp_path / "again")
    assert auto_map_of(tmp_path / "again") == auto_map_of(tmp_path / "with")
    assert (tmp_path / "again" / "modeling_dcformer.py").is_file()
    loaded.save_pretrained(tmp_path / "plain", with_code=False)
    assert auto_map_of(tmp_path / "plain") == {} and not list((tmp_path / "plain").glob("*.py"))
    assert loaded.config.auto_map == auto_map_of(tmp_path / "with")


def test_a_class_of_the_users_own_is_not_shared_under_our_name(tmp_path):
    class OwnConfig(DCFormerConfig):
        model_type = "own"

    with pytest.raises(ValueError, match=r"OwnConfig .*'own'.* is defined outside dcformer"):
        OwnConfig(hidden_size=32, num_attention_heads=4).save_pretrained(tmp_path, with_code=True)


def test_an_auto_map_of_others_stays_as_it_is(tmp_path):
    config = tiny_config()
    config.auto_map = {"AutoModelForCausalLM": "my_model.MyModel"}
    config.save_pretrained(tmp_path)
    assert auto_map_of(tmp_path) == {"AutoModelForCausalLM": "my_model.MyModel"} and not list(tmp_path.glob("*.py"))


def test_headers_carry_our_version_and_the_checksum_of_the_source(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "new")
    assert metadata(tmp_path / "new") == {"format": "pt", "dcformer_version": dcformer.__version__}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "new" / "model.safetensors", {"format": "pt", "source_sha256": "ab" * 32})
    AutoModelForCausalLM.from_pretrained(tmp_path / "new").save_pretrained(tmp_path / "again")
    assert metadata(tmp_path / "again")["source_sha256"] == "ab" * 32
    assert read_header_notes(tmp_path / "again") == {
        "dcformer_version": dcformer.__version__,
        "source_sha256": "ab" * 32,
    }


def test_the_same_weights_are_the_same_bytes_however_often_they_are_saved(tmp_path):
    model, found = tiny_model(), set()
    for number in range(8):  # the safetensors library draws the order of its metadata anew each time
        model.save_pretrained(tmp_path / str(number))
        found.add((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert len(found) == 1
    assert metadata(tmp_path / "0") == {"format": "pt", "dcformer_version": dcformer.__version__}


def test_notes_are_in_every_shard_and_in_nobody_elses_files(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, modeling_utils

    writer = modeling_utils.safe_save_file
    tiny_model().save_pretrained(tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1 and modeling_utils.safe_save_file is writer
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            assert file.metadata()["dcformer_version"] == dcformer.__version__
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(tmp_path / "llama")
    assert metadata(tmp_path / "llama") == {"format": "pt"}


@pytest.mark.parametrize(
    "variant, said",
    [("dcformer", "rank 2"), ("plain_gated_transformer", "plain attention heads"), ("grouped", "2 gro")],
)
def test_a_saved_folder_has_a_model_card(variant, said, tmp_path):
    model = tiny_model(variant)
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["dcformer", "dcmha"]
    assert said in text and f"{model.num_parameters():,} parameters" in text
    assert "import dcformer" in text and "trust_remote_code" not in text and "[More Information" not in text


def test_the_card_shows_code_that_loads_the_model(tmp_path, monkeypatch):
    DCFormerModel(tiny_config()).save_pretrained(tmp_path / "base")
    text = (tmp_path / "base" / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(text.split("```python\n")[1].split("```")[0], namespace)
    assert type(namespace["model"]) is DCFormerModel
    assert ModelCard(text).data.pipeline_tag == "feature-extraction"


def test_a_card_that_somebody_wrote_or_edited_stays(tmp_path):
    model, card = tiny_model(), tmp_path / "README.md"
    model.save_pretrained(tmp_path)
    edited = card.read_text().replace("## Limits", "## What I found\n\nMuch.\n\n## Limits")
    card.write_text(edited)
    model.save_pretrained(tmp_path, with_code=True)
    assert card.read_text() == edited
    card.write_bytes(b"\xffmine\r\n")
    model.save_pretrained(tmp_path)
    assert card.read_bytes() == b"\xffmine\r\n"


def test_a_card_that_nobody_touched_follows_the_model(tmp_path):
    tiny_model().save_pretrained(tmp_path, with_code=True)
    larger = tiny_model(num_hidden_layers=3)
    larger.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert f"{larger.num_parameters():,} parameters" in text and "trust_remote_code" not in text and is_untouched(text)


def test_licence_and_base_model_come_from_the_card_of_the_source(tmp_path):
    tiny_model().save_pretrained(tmp_path / "first")
    (tmp_path / "first" / "README.md").write_text("---\nlicense: mit\nbase_model: someone/something\n---\n# Mine\n")
    AutoModelForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    data = ModelCard.load(tmp_path / "second" / "README.md").data
    assert (data.license, data.base_model) == ("mit", "someone/something")


def test_the_cards_of_trainer_and_peft_are_theirs(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    model = tiny_model()
    trainer = Trainer(model, TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True))
    trainer.save_model()
    trainer.create_model_card(model_name="my-run")
    theirs = (tmp_path / "run" / "README.md").read_text()
    assert "# my-run" in theirs and "generated_from_trainer" in ModelCard(theirs).data.tags
    trainer.save_model()
    assert (tmp_path / "run" / "README.md").read_text() == theirs
    adapted = get_peft_model(model, LoraConfig(target_modules=["qkv_proj"], r=2))
    adapted.save_pretrained(tmp_path / "adapter")
    assert ModelCard.load(tmp_path / "adapter" / "README.md").data.library_name == "peft"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with FakeHub(tmp_path / "hub") as hub:
        hub.use(monkeypatch, tmp_path / "cache")
        yield hub


def test_a_model_goes_to_the_hub_and_comes_back(hub, tmp_path):
    model = tiny_model()
    model.push_to_hub("someone/tiny", with_code=True, tags=["mine"])
    names = set(hub.files("someone/tiny"))
    assert {"config.json", "model.safetensors", "README.md", "modeling_dcformer.py", "presets_dcformer.py"} <= names
    text = hub.files("someone/tiny")["README.md"].decode()
    assert "# someone/tiny" in text and "[More Information" not in text
    assert ModelCard(text).data.tags == ["dcformer", "dcmha", "mine"]
    loaded = AutoModelForCausalLM.from_pretrained("someone/tiny").eval()
    ids = random_tokens(1, 9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.save_pretrained(tmp_path / "back")
    assert ModelCard.load(tmp_path / "back" / "README.md").data.base_model == "someone/tiny"
    assert auto_map_of(tmp_path / "back") == auto_map_of_bytes(hub.files("someone/tiny")["config.json"])


def auto_map_of_bytes(content: bytes) -> dict[str, str]:
    return json.loads(content)["auto_map"]


def test_a_push_keeps_the_cards_of_the_repository_and_of_the_folder(hub, tmp_path):
    model = tiny_model()
    model.push_to_hub("someone/tiny")
    hub.commit("someone/tiny", {"README.md": b"---\ntags: [theirs]\n---\n# Theirs\n"})
    model.push_to_hub("someone/tiny")
    assert b"# Theirs" in hub.files("someone/tiny")["README.md"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("# Mine\n")
    model.save_pretrained(tmp_path / "mine", push_to_hub=True, repo_id="someone/tiny")
    assert (tmp_path / "mine" / "README.md").read_text() == "# Mine\n"
    assert b"# Theirs" in hub.files("someone/tiny")["README.md"]
    model.save_pretrained(tmp_path / "mine", push_to_hub=True, repo_id="someone/other", with_code=True)
    assert hub.files("someone/other")["README.md"] == b"# Mine\n"
    assert "modeling_dcformer.py" in hub.files("someone/other")


def test_a_configuration_goes_to_the_hub_with_its_code(hub, tmp_path):
    tiny_config().save_pretrained(tmp_path / "config", push_to_hub=True, repo_id="someone/config", with_code=True)
    assert "modeling_dcformer.py" in hub.files("someone/config")
    assert AutoConfig.from_pretrained("someone/config").hidden_size == 32
    assert AutoModel.from_config(tiny_config()).config.hidden_size == 32
