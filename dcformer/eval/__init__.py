"""Evaluation with lm-evaluation-harness: tasks of the paper's tables, a runner, and reports."""

from .suites import TaskSummary, find_tasks, list_tasks
from .table4_tasks import tasks_folder


__all__ = ["TaskSummary", "find_tasks", "list_tasks", "tasks_folder"]
