"""Evaluation with lm-evaluation-harness: tasks of the paper's tables, a runner, statistics and reports."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import published
from .data import TABLE4_COLUMNS, Source, source_of
from .suites import (
    AUTHORS_TASKS,
    HEAD_TASKS,
    SUITES,
    TaskSummary,
    find_tasks,
    list_tasks,
    task_manager,
    tasks_folder,
)


if TYPE_CHECKING:
    from .head_tasks import authors_texts, head_task_summary
    from .model import DCFormerLM
    from .plot import plot_deltas
    from .records import Record, model_fingerprint, model_folder, read_records, read_samples, write_record
    from .report import Report, build_report
    from .run import evaluate, quiet_harness
    from .stats import (
        Difference,
        SeedComparison,
        compare_seeds,
        further_share_interval,
        holm,
        paired_difference,
        seed_interval,
        sign_test,
    )

# Imported when they are asked for: the harness and torch take seconds, and a list of tasks needs neither.
_LAZY = {
    "head_tasks": ("authors_texts", "head_task_summary"),
    "model": ("DCFormerLM",),
    "plot": ("plot_deltas",),
    "records": ("Record", "model_fingerprint", "model_folder", "read_records", "read_samples", "write_record"),
    "report": ("Report", "build_report"),
    "run": ("evaluate", "quiet_harness"),
    "stats": (
        "Difference",
        "SeedComparison",
        "compare_seeds",
        "further_share_interval",
        "holm",
        "paired_difference",
        "seed_interval",
        "sign_test",
    ),
}
_MODULES = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    "AUTHORS_TASKS",
    "DCFormerLM",
    "Difference",
    "HEAD_TASKS",
    "Record",
    "Report",
    "SUITES",
    "SeedComparison",
    "Source",
    "TABLE4_COLUMNS",
    "TaskSummary",
    "authors_texts",
    "build_report",
    "compare_seeds",
    "evaluate",
    "find_tasks",
    "further_share_interval",
    "head_task_summary",
    "holm",
    "list_tasks",
    "model_fingerprint",
    "model_folder",
    "paired_difference",
    "plot_deltas",
    "published",
    "quiet_harness",
    "read_records",
    "read_samples",
    "seed_interval",
    "sign_test",
    "source_of",
    "task_manager",
    "tasks_folder",
    "write_record",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
