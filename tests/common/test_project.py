"""What contributors run before a commit: the versions of the hooks, and the form of a commit's subject."""

import re
import subprocess
from pathlib import Path

import yaml


ROOT = Path(__file__).parents[2]


def test_hooks_have_the_versions_of_the_constraints_and_run_what_is_there():
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.M))
    *remote, local = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    for repo in remote:
        assert repo["rev"] == "v" + pinned[repo["hooks"][0]["id"].partition("-")[0]]
    entries = {hook["id"]: hook["entry"] for hook in local["hooks"]}
    assert entries["mypy"] == ".venv/bin/mypy" and (ROOT / entries["subject"]).exists() and "mypy" in pinned


def test_a_subject_has_a_scope_and_at_most_72_characters(tmp_path):
    good = ["kernels: load keys ahead", "cli, docs: " + "é" * 61, 'Revert "kernels: load keys ahead"']
    bad = ["cli, docs: " + "é" * 62, "Kernels load keys ahead", "kernels:load keys ahead", "kernels: "]
    for subject in (*good, *bad):
        (tmp_path / "message").write_text(f"{subject}\n\nWhy: {'x' * 90}\n", "utf-8")
        done = subprocess.run([ROOT / "scripts/check_subject", tmp_path / "message"], capture_output=True)
        assert done.returncode == bool(done.stderr) == (subject in bad), subject
