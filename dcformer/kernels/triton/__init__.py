"""Kernels for GPUs in Triton: attention forward, backward and decoding, compose weights, and rotation."""
