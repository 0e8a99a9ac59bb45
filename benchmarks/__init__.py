"""Benchmarks of the operator, its kernels, and of whole models; see README.md."""
