"""README and docs/: examples run and print what is shown, commands exist, figures are the computed ones."""

import json
import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch._dynamo.config
import yaml
from command_line import call

import dcformer
from dcformer import cache_bytes_per_token, cli, dcmha


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Run by every `make test`; those of all pages by `pytest tests/docs --all-pages`.
RUN_ALWAYS = ("README", "conversion", "exporting", "generation", "drop_in", "operator", "questions", "sharing")
# Their examples train or evaluate; tests of their rooms run those.
RUN_ELSEWHERE = ("evaluation", "sweeps", "training")
# They must be of torch's build, so `make` installs them only where they are; examples without them are left out.
OF_TORCHS_BUILD = ("timm", "torchvision")
# The page names a checkpoint of 5.7 GB; the bundled model stands in for it.
PUBLISHED, BUNDLED = '"Caiyun-AI/DCFormer-2.8B"', repr(dcformer.pretrained_path("dcformer-tiny"))


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """(language, text) of a page's fenced blocks."""
    found = re.findall(r"^```([^`\n]*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    return [(language, text) for language, text in found if language in languages]


def table(text: str, first_heading: str) -> list[list[str]]:
    """Cells of the rows below the heading of a Markdown table."""
    lines = text[re.search(rf"^\| {re.escape(first_heading)} \|", text, re.M).start() :].splitlines()[2:]
    rows = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def pytest_generate_tests(metafunc):
    if "example_page" in metafunc.fixturenames:
        chosen = [page for page in PAGES if page.stem not in RUN_ELSEWHERE and blocks(page, "python")]
        if not metafunc.config.getoption("--all-pages"):
            chosen = [page for page in chosen if page.stem in RUN_ALWAYS]
        of_newer = pytest.mark.newer_transformers("a cache has another name")
        marks = {page: [of_newer] if "cache=" in page.read_text(encoding="utf-8") else [] for page in chosen}
        pages = [pytest.param(page, marks=marks[page], id=page.stem) for page in chosen]
        metafunc.parametrize("example_page", pages)


# Making entries of this cache takes longer than they save, where lengths are free.
@torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
def test_its_examples_run_and_print_what_it_says(example_page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dcmha, "BACKENDS", dict(dcmha.BACKENDS))
    for shared in (dcformer.DCFormerConfig, dcformer.DCFormerForCausalLM):  # with their code, on one page
        monkeypatch.setattr(shared, "_auto_class", None)
    namespace = {}
    found, missing = blocks(example_page, "python", "text"), []
    for number, (language, text) in enumerate(found):
        if language == "text":
            assert number > 0 and found[number - 1][0] == "python", f"output without its code: {text}"
            continue
        needed = [name for name in OF_TORCHS_BUILD if re.search(rf"^(import|from) {name}\b", text, re.M)]
        if absent := [name for name in needed if find_spec(name) is None]:
            missing += absent
            continue
        capsys.readouterr()
        code, file = text.replace(PUBLISHED, BUNDLED), tmp_path / f"{example_page.stem}_{number}.py"
        file.write_text(code, encoding="utf-8")  # libraries read the source of what calls them
        exec(compile(code, str(file), "exec"), namespace)
        if number + 1 < len(found) and found[number + 1][0] == "text":
            assert capsys.readouterr().out == found[number + 1][1]
    if missing:
        pytest.skip(f"all examples ran but those of {' and '.join(missing)}, which is not installed")


def test_the_first_command_prints_what_its_page_says_and_does_not_repeat_itself():
    page = (DOCS / "command_line.md").read_text(encoding="utf-8")
    command, said = re.search(r"```bash\n(dcformer generate [^\n]*)\n```\n\n(.*?)\. ", page, re.S).groups()
    printed = call(*shlex.split(command)[1:], catch_exceptions=False).stdout
    lines = [line for line in printed.splitlines() if line]
    assert lines == re.findall(r"`(#.*?)`", said) and len(set(lines)) == len(lines) > 1


def command_lines() -> dict[str, list[list[str]]]:
    """`dcformer` command -> the argument lists with which the pages show it."""
    found: dict[str, list[list[str]]] = {}
    for page in PAGES:
        for _, text in blocks(page, "bash"):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["dcformer"]:
                    depth = 3 if words[1] in ("convert", "lm-eval") else 2
                    found.setdefault(" ".join(words[1:depth]), []).append(words[depth:])
    return found


def test_commands_that_are_shown_exist_with_their_options(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    missing = []
    for command, uses in command_lines().items():
        monkeypatch.setattr(sys, "argv", ["dcformer", *command.split(), "--help"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (0, None), command
        shown = capsys.readouterr().out
        options = {word.partition("=")[0] for words in uses for word in words if word.startswith("--")}
        missing += [(command, option) for option in options if not re.search(rf"{option}\b", shown)]
    assert missing == []


def test_memory_needs_are_those_of_the_shapes():
    for name, parameters, bfloat16, float32, cache in table(README, "checkpoint"):
        preset = re.search(r"\[([\w.-]+)\]", name).group(1).lower()
        family = "DCPythia" if preset.startswith("dcpythia") else "DCFormer"
        config = getattr(dcformer, f"{family}Config").from_preset(preset)
        with torch.device("meta"):
            count = getattr(dcformer, f"{family}ForCausalLM")(config).num_parameters()
        seen = [config.sliding_window if kind == "sliding_attention" else 2048 for kind in config.layer_types]
        cached = sum(seen) * cache_bytes_per_token(config, torch.bfloat16)
        assert parameters == f"{count / 1e9:.2f} billion"
        assert bfloat16 == f"{2 * count / 1e9:.1f} GB" and float32 == f"{4 * count / 1e9:.1f} GB"
        assert cache == f"{cached / 1e9:.2f} GB"


def test_costs_of_reproducing_the_paper_are_those_of_the_flops():
    training = pytest.importorskip("dcformer.training")
    table_4, _, trained = table(README, "run")
    plan = training.plan_run(training.load_recipe("dcformer++-405m"))
    counted = json.loads((ROOT / "benchmarks/results/evaluation_tokens.json").read_text())["figures"]
    tokens = sum(counted[f"all, {shots}-shot"]["computed"] for shots in (0, 5))
    forward = training.flops_per_token(dcformer.DCPythiaConfig.from_preset("dcpythia-6.9b"), 1024) / 3
    for row, flops in ((table_4, tokens * forward), (trained, plan.flops)):
        hours = [f"{flops / (share * training.peak_flops('bf16', 'H100') * 3600):.2g}" for share in (0.4, 0.1)]
        assert row[3] == f"{hours[0]} to {hours[1]} hours of an H100"
    assert trained[1] == f"{plan.memory_bytes / 1e9:.1f} GB"
    assert table_4[1] in next(row for row in table(README, "checkpoint") if "DCPythia-6.9B" in row[0])


def test_values_that_the_page_on_configuration_shows_make_a_configuration():
    page = re.sub(r"^```.*?^```", "", (DOCS / "configuration.md").read_text(encoding="utf-8"), flags=re.S | re.M)
    shown = sorted(set(re.findall(r"`(\w+=[^`]+)`", page)))
    assert len(shown) > 10
    for text in shown:
        values = eval(f"dict({text})", {"w": 4})
        config = dcformer.DCFormerConfig(**values)
        assert {name: getattr(config, name) for name in values} == values


def test_the_picture_of_the_cache_is_drawn_from_the_shapes():
    drawing = runpy.run_path(str(DOCS / "images/draw_cache.py"))
    assert drawing["FILE"].read_text(encoding="utf-8") == drawing["draw"]()


def test_the_citation_is_the_same_in_both_places():
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["preferred-citation"]
    ((_, entry),) = blocks(ROOT / "README.md", "bibtex")
    fields = dict(re.findall(r"^  (\w+) += {(.*)}", entry, re.M))
    authors = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    titles = {"title": paper["title"], "booktitle": paper["collection-title"], "url": paper["url"]}
    assert fields == {**titles, "author": authors, "year": str(paper["year"])}


def test_the_architecture_names_files_that_exist():
    sources = (DOCS / "architecture.md", DOCS / "images" / "token.svg")
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    names = {name.lstrip("/") for name in re.findall(r"[\w/]+\.(?:py|json)\b|\b[\w/]+/(?=[`\s])", text)}
    folders = [ROOT, *(ROOT / "dcformer" / room for room in ("", "head_tasks", "conversion", "eval"))]
    missing = {name for name in names if not any((folder / name).exists() for folder in folders)}
    assert {name for name in missing if "NAME" not in name} == set()
