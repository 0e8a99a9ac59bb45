"""How this process was started."""

import os
import sys


def is_dcformer_command() -> bool:
    """
    Whether this process is the `dcformer` command: its script, or `python -m dcformer.cli`.

    The command line that the interpreter was started with decides, not `sys.argv` alone, which processes inherit that
    are spawned by the command (of `multiprocessing`, say) and which run other code.
    """
    own = len(sys.orig_argv) - len(sys.argv)  # where the program stands, after the options of the interpreter
    if own < 1 or not sys.argv:  # another program has set the arguments
        return False
    program = sys.orig_argv[own]
    if sys.argv[0] == "-m":  # as long as the module is being looked up
        return sys.orig_argv[own - 1].startswith("-") and program in ("dcformer.cli", "dcformer.cli.__main__")
    return program == sys.argv[0] and os.path.basename(program) in ("dcformer", "dcformer.exe")
