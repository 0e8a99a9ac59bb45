"""
DCFormer for Transformers.

Importing this package registers its models with the Auto classes, which imports torch and Transformers. Only where the
`dcformer` command starts, that is left to the commands that load models (`cli/running.py`): it takes five seconds, for
which nobody who asks for help should wait. The command lies inside the package, so that this file is run before it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .common.command_line import is_dcformer_command
from .version_dcformer import __version__ as __version__


if TYPE_CHECKING or not is_dcformer_command():
    from .public import *  # noqa: F403
    from .public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """The public names, for what the command calls."""
        return getattr(import_module(".public", __name__), name)
