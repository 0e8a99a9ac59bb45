"""Benchmarks of the operator and of whole models: `dcformer bench`, or `python -m dcformer.bench` without extras."""
