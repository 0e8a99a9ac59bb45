"""
DCFormer for Transformers.

Importing this package imports `public.py`, whose list registers the models, and with it torch and Transformers, which
takes ten times as long as the help of the `dcformer` command should. So `dcformer_command` says that it is running, and
its subcommands import `loading.py`, and with it `public.py`, where they load models.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version_dcformer import __version__ as __version__


if TYPE_CHECKING or not getattr(sys.modules.get("dcformer_command"), "is_running", False):
    from .public import *  # noqa: F403
    from .public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        return getattr(import_module(".public", __name__), name)
