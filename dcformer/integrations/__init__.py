"""
The changes of this package in others, so that they know its models: one function a file.

Importing the package calls those in the list of `dcformer.public`; `name_models_for_server` is for a server's process.
"""

from .auto_classes import register_auto_classes
from .peft import add_peft_targets
from .tensor_parallel import add_tensor_parallel_plan
from .transformers_server import name_models_for_server


__all__ = ["add_peft_targets", "add_tensor_parallel_plan", "name_models_for_server", "register_auto_classes"]
