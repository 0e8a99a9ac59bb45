"""Evaluation with lm-evaluation-harness: tasks of the paper's tables, a runner, statistics and reports."""

import importlib
from typing import Any


# Imported when they are asked for: the harness and torch take seconds, and a list of tasks needs neither.
_PUBLIC = {
    "task_data": "TABLE4_COLUMNS Source source_of",
    "head_task_answers": "authors_texts",
    "lm_eval_model": "DCFormerLM",
    "plot": "plot_deltas",
    "records": "Record Settings in_paper_order model_fingerprint model_folder read_records read_samples write_record",
    "evaluation_report": "Report build_report",
    "legend": "differences_from_published",
    "evaluator": "EvaluationOptions evaluate quiet_harness",
    "stats": "Difference holm paired_difference sign_test",
    "suites": "AUTHORS_TASKS HEAD_TASKS SUITES TaskSummary find_tasks list_tasks task_manager tasks_folder",
    "published": "",
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = ["published", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    if name in _PUBLIC:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
