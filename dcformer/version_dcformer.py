"""The version of dcformer, in a separate file, so that a copy of the code beside a checkpoint has it too."""

__version__ = "0.1.0"
