"""
`python -m dcformer.serving FOLDER serve MODEL ...`: the command `transformers` in FOLDER, with our models registered.

Transformers' server calls a model by its path; started in the folder of a bundled model, that is the model's name.
"""

import os
import sys

from transformers.cli.transformers import app
from transformers.utils.import_utils import is_serve_available

from ..common.optional import install_hint


if not is_serve_available():
    sys.exit(f"Transformers' server needs more packages: {install_hint('serve')}.")
os.chdir(sys.argv.pop(1))
app(prog_name="transformers")
