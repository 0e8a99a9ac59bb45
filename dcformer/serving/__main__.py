"""
`python -m dcformer.serving FOLDER serve MODEL ...`: the command `transformers` in FOLDER, with our models registered.

Transformers' server calls a model by its path; started in the folder of a bundled model, that is the model's name.
"""

import os
import sys

from transformers.cli.transformers import app

from ..integrations import name_models_for_server
from .limits import refuse_what_does_not_fit


name_models_for_server()
refuse_what_does_not_fit()
os.chdir(sys.argv.pop(1))
app(prog_name="transformers")
