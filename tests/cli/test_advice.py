"""Messages that advise an option: the commands that can say them have it."""

import ast
import re
from pathlib import Path

import pytest
import typer

import dcformer
from dcformer.cli import app


PACKAGE = Path(dcformer.__file__).parent

# An option in a sentence, with the name of the program before it if it is another's. `var(--name)` is CSS.
_OPTION = re.compile(r"(?P<program>lm-eval's )?(?<![\w-])(?<!var\()`?(?P<option>--[a-z][a-z0-9_-]*)")

# The commands that run the code of a room, or of a file of it where fewer can reach it.
_ALL = None
COMMANDS = {
    "cli/evaluate.py": ("eval", "report", "tasks"),
    "cli/train.py": ("train",),
    "cli/convert.py": ("convert maxtext", "convert pax", "convert torch", "convert to-maxtext"),
    "cli/inspect.py": ("inspect",),
    "cli/verify.py": ("verify",),
    "cli/generate.py": ("generate",),
    "cli/demo.py": ("demo",),
    "cli/serve.py": ("serve",),
    "cli/card.py": ("card",),
    "cards": ("card", "eval"),
    "demo": ("demo",),
    "generation": ("generate",),
    "serving": ("serve",),
    "eval/report.py": ("eval", "report"),
    "eval/report_tables.py": ("eval", "report"),
    "eval/records.py": ("eval", "report"),
    "eval/plot.py": ("report",),
    "eval": ("eval",),
    "head_tasks": ("eval",),
    "conversion": ("convert maxtext", "convert pax", "convert torch", "convert to-maxtext", "inspect", "verify"),
    "training": ("train",),
    "experiments": ("train",),
    "": _ALL,
}


def options_of_commands():
    """Name of a command, with spaces -> its options."""
    found = {}

    def walk(command, name):
        for key, child in getattr(command, "commands", {}).items():
            walk(child, f"{name} {key}".strip())
        found[name] = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}

    walk(typer.main.get_command(app), "")
    return found


def texts(source):
    """Line and text of every string, an f-string as one with `{}` for its values; without the arguments of git."""
    tree = ast.parse(source)
    left_out = set()
    for node in ast.walk(tree):
        is_git = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_git"
        is_git |= isinstance(node, ast.List) and [getattr(word, "value", None) for word in node.elts[:1]] == ["git"]
        if is_git or isinstance(node, ast.JoinedStr):
            left_out.update(id(child) for child in ast.walk(node) if child is not node)
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def commands_of(place):
    """The key of the commands that reach a file of the package: the longest that is the file or a folder of it."""
    return max((key for key in COMMANDS if key == "" or place == key or place.startswith(f"{key}/")), key=len)


def wrong_advice(place, source, options, options_of_lm_eval):
    """Line, option and text of every option that a message names and its commands lack."""
    key = commands_of(place)
    reached = [options[name] for name in COMMANDS[key] or options]
    known = set.union(*reached)
    for line, text in texts(source):
        for match in _OPTION.finditer(text):
            if match["option"] not in (options_of_lm_eval if match["program"] else known):
                yield line, match["option"], text


@pytest.fixture(scope="module")
def options():
    return options_of_commands()


@pytest.fixture(scope="module")
def options_of_lm_eval():
    pytest.importorskip("lm_eval")
    from lm_eval._cli.harness import HarnessCLI

    found = set()
    parsers = [HarnessCLI()._parser]
    while parsers:
        for action in parsers.pop()._actions:
            found.update(action.option_strings)
            parsers += getattr(action, "choices", None).values() if isinstance(action.choices, dict) else []
    return found


def test_the_commands_are_found(options):
    assert {"eval", "report", "train", "convert torch", "verify"} <= options.keys()
    assert "--max-length" in options["eval"] and "--no-verify" in options["convert torch"]


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_option_that_a_message_names_exists(file, options, options_of_lm_eval):
    place = file.relative_to(PACKAGE).as_posix()
    assert list(wrong_advice(place, file.read_text(encoding="utf-8"), options, options_of_lm_eval)) == []


@pytest.mark.parametrize(
    ("place", "source", "option"),
    [
        ("eval/perplexity.py", "raise ValueError(f\"give {x}, or `--metadata '{{}}'` for figures\")", "--metadata"),
        ("eval/plan.py", 'raise ValueError("a" f"{x}: leave it out by " "--no-authorss")', "--no-authorss"),
        ("eval/plot.py", '"use --tasks"', "--tasks"),
        ("training/run.py", '"start over with --force"', "--force"),
        ("common/terminal.py", '"see --nothing-of-the-kind."', "--nothing-of-the-kind"),
        ("eval/plan.py", '"pass lm-eval\'s --no-such-thing"', "--no-such-thing"),
    ],
    ids=lambda value: value if value.startswith("--") else "",
)
def test_advice_that_cannot_be_followed_is_found(place, source, option, options, options_of_lm_eval):
    assert [found for _, found, _ in wrong_advice(place, source, options, options_of_lm_eval)] == [option]


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("eval/perplexity.py", '"pass lm-eval\'s --metadata"'),
        ("eval/plan.py", 'f"give --max-length {n} (max_length={n})"'),
        ("eval/provenance.py", '_git(root, "status", "--porcelain")'),
        ("eval/plot.py", '"choose one by --baseline."'),
    ],
    ids=["of lm-eval", "with a value", "of git", "of the report"],
)
def test_advice_that_can_be_followed_passes(place, source, options, options_of_lm_eval):
    assert list(wrong_advice(place, source, options, options_of_lm_eval)) == []
