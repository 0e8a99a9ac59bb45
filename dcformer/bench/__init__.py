"""Benchmarks of the operator and of whole models: `dcformer bench`."""
