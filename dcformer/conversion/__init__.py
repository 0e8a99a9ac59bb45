"""Converting checkpoints between the authors' JAX and torch formats and Transformers folders."""

from .convert import convert_hub, convert_maxtext, convert_pax
from .report import ConversionReport
from .verification import Comparison, compare


__all__ = ["Comparison", "ConversionReport", "compare", "convert_hub", "convert_maxtext", "convert_pax"]
