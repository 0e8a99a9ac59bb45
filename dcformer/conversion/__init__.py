"""Converting checkpoints between the authors' JAX and torch formats and Transformers folders.

A conversion goes through these in turn, each of which returns the next:

    Source       the arrays that lie somewhere       arrays.py, orbax.py, stores.py
    Checkpoint   its model: configuration, layout    maxtext.py, pax.py, authors_torch.py, upcycle.py; mapping.py
    Files        what goes beside the weights        beside.py
    Plan         all that will be done               plan.py
    report       what was done                       writer.py, to_maxtext.py; destination.py

convert.py and upcycle.py go through them. gguf.py and settings.py read GGUF files and settings in JSON and YAML,
inspection.py tells and describes formats, conversion_report.py records, and verify.py checks hashes, logits, and
whether two checkpoints are the same model.
"""

from ..common.dtypes import dtype_name
from .arrays import Source, SourceArray, open_weights
from .conversion_report import REPORT_FILE, ConversionReport
from .convert import convert_maxtext, convert_pax, convert_torch
from .destination import Destination
from .inspection import Inspection, detect_format, inspect_checkpoint
from .plan import Checkpoint, Files, Layout, Part, Plan, make_plan
from .to_maxtext import MaxTextReport, convert_to_maxtext
from .upcycle import upcycle
from .verify import Comparison, HashCheck, compare, verify_hashes
from .writer import write_model


__all__ = ["convert_maxtext", "convert_pax", "convert_torch", "convert_to_maxtext", "upcycle"]
__all__ += ["ConversionReport", "MaxTextReport", "REPORT_FILE", "inspect_checkpoint", "Inspection", "detect_format"]
__all__ += ["compare", "Comparison", "verify_hashes", "HashCheck", "open_weights", "dtype_name"]
__all__ += ["SourceArray", "Source", "Part", "Layout", "Checkpoint", "Files", "Plan", "make_plan"]
__all__ += ["Destination", "write_model"]
