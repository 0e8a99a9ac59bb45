"""
`python -m dcformer.serving FOLDER serve MODEL ...`: the command `transformers` in FOLDER, with our models registered.

The server of Transformers calls a model by its path, which for a bundled one in its folder is its name.
"""

import os
import sys

from transformers.cli.transformers import app


os.chdir(sys.argv.pop(1))
app(prog_name="transformers")
