"""Packages of the extras: one that is missing is named with its extra, one that is broken is not called missing."""

import importlib.metadata
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dcformer
from dcformer.common.optional import import_optional, import_vllm, install_hint


ROOT = Path(dcformer.__file__).parents[1]


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match=r'A plot needs no_such: pip install "\.\[eval\]" in a clone'):
        import_optional("no_such.module", "A plot", "eval")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_there.py").write_text("import no_such_either")
    with pytest.raises(ImportError, match="A plot needs no_such_either"):
        import_optional("half_there", "A plot", "eval")
    (tmp_path / "broken.py").write_text("from sys import no_such_name")
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        import_optional("broken", "A plot", "eval")
    assert import_optional("sys", "A plot", "eval") is sys


def test_vllm_has_settings_that_the_environment_overrides(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_LEVEL": "DEBUG"})
    assert import_vllm("--engine vllm", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="4").__name__ == "vllm"
    assert os.environ == {
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }


def test_every_extra_that_is_named_exists():
    extras = importlib.metadata.metadata("dcformer").get_all("Provides-Extra")
    form = re.escape(install_hint("EXTRAS").partition(" in ")[0]).replace("EXTRAS", r"([\w,]+)")
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    named = [names for page in pages for names in re.findall(form, page.read_text(encoding="utf-8"))]
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "dcformer").rglob("*.py"))
    named += re.findall(r'(?:import_optional\(.+, |install_hint\()["\'](\w+)["\']\)', code)
    assert len(named) > 15
    assert set(",".join(named).split(",")) <= set(extras)
    everything = [path.read_text(encoding="utf-8") for path in [*pages, *(ROOT / "dcformer").rglob("*.py")]]
    assert not any("dcformer[" in text for text in everything)  # no index has such a distribution yet
