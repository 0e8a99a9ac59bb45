"""Benchmarks of the operator, of one layer's memory and of whole models; see README.md."""
