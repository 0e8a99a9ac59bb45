"""Composed attention on GPUs, operator by operator. The modules here need torch and Triton and nothing of this package."""
