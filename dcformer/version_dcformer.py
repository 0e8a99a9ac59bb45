"""The version of dcformer, in a file of its own, so that a copy of the code beside a checkpoint knows it too."""

__version__ = "0.1.0"
