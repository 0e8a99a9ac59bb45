"""Evaluation with lm-evaluation-harness: tasks of the paper's tables, a runner, and reports."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .suites import TaskSummary, find_tasks, list_tasks
from .table4_tasks import tasks_folder


if TYPE_CHECKING:
    from .language_model import DCFormerLM
    from .records import Record, read_records
    from .report import build_report
    from .runner import evaluate

__all__ = [
    "DCFormerLM",
    "Record",
    "TaskSummary",
    "build_report",
    "evaluate",
    "find_tasks",
    "list_tasks",
    "read_records",
    "tasks_folder",
]

# Imported when they are asked for: the harness and torch take seconds, and a list of tasks needs neither.
_HEAVY = {
    "DCFormerLM": "language_model",
    "Record": "records",
    "build_report": "report",
    "evaluate": "runner",
    "read_records": "records",
}


def __getattr__(name: str) -> Any:
    if name in _HEAVY:
        return getattr(importlib.import_module(f".{_HEAVY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
