"""Kernels of these tests run in Triton's interpreter where there is no GPU."""

from quick_interpreter import spare_repeated_patches


spare_repeated_patches()
