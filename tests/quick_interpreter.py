"""Triton's interpreter without a step that it repeats: for the time of the tests alone."""

import os


def spare_repeated_patches() -> None:
    """
    A kernel that runs in the interpreter has the language replaced by what works on arrays until it ends. Functions
    that it calls have that done once more, each time that they are called, which takes half of the time. Ours see the
    modules that the kernel sees, and those of Triton's library see others, which stay replaced after the first time.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import InterpretedFunction

    patching_call = InterpretedFunction.__call__
    patched: set[str] = set()

    def call(self, *args, **kwargs):
        module = self.fn.__module__
        if module.startswith("dcformer.") or module in patched:
            return self.rewrite()(*args, **kwargs)
        patched.add(module)
        return patching_call(self, *args, **kwargs)

    if patching_call.__module__ != __name__:
        InterpretedFunction.__call__ = call
