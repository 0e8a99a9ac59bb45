"""Evaluation with lm-evaluation-harness: tasks of the paper's tables, a runner, and reports."""
