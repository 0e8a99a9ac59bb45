"""Composed attention on GPUs, operator by operator: these files need torch and Triton and nothing else."""
