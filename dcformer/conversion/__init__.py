"""Converting checkpoints between the authors' JAX and torch formats and Transformers folders.

inspection.py                     which format a checkpoint has, and what is in it
maxtext.py, pax.py, authors_torch.py   a checkpoint of each format as a plan
mapping.py, plan.py               which array becomes which parameter: the tables and the complete plan
arrays.py, orbax.py, stores.py    reading: safetensors, torch, NumPy; orbax and zarr; local folders and buckets
gguf.py, settings.py              reading: GGUF; the JSON and YAML beside weights
convert.py, writer.py, destination.py, report.py   a plan as a Transformers folder
to_maxtext.py                     Transformers folders to MaxText checkpoints
upcycle.py                        pretrained models of other families, with a composition to be trained
verify.py                         hashes, logits, and whether two checkpoints are the same model
"""

from ..common.dtypes import dtype_name
from .arrays import SourceArray, open_weights
from .convert import convert_maxtext, convert_pax, convert_torch, write_model
from .destination import Destination
from .inspection import Inspection, detect_format, inspect_checkpoint
from .plan import Part, Plan, complete
from .report import REPORT_FILE, ConversionReport
from .to_maxtext import MaxTextReport, convert_to_maxtext
from .upcycle import upcycle
from .verify import Comparison, HashCheck, compare, verify_hashes


__all__ = [
    "Comparison",
    "ConversionReport",
    "Destination",
    "HashCheck",
    "Inspection",
    "MaxTextReport",
    "Part",
    "Plan",
    "REPORT_FILE",
    "SourceArray",
    "compare",
    "complete",
    "convert_maxtext",
    "convert_pax",
    "convert_to_maxtext",
    "convert_torch",
    "detect_format",
    "dtype_name",
    "inspect_checkpoint",
    "open_weights",
    "upcycle",
    "verify_hashes",
    "write_model",
]
