"""When the Triton forms are chosen without being asked for: where they can run and a verdict lets them."""

import functools
import hashlib
import logging
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from .. import ops
from ..dcmha_chunked import chunked_attention
from ..dcmha_factors import ComposeWeights
from ..dcmha_mask import Visibility
from ..dcmha_one_query import one_query_attention
from ..version_dcformer import __version__
from .cases import PREFILL, Case, case_of
from .checks import Examination
from .compiled import compiled_forward, why_not_unasked
from .triton_form import triton_attention, triton_version, why_not_triton
from .verdict_file import Machine, Verdict
from .verdicts import Verdicts, describe


logger = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/version")


def torch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    scaling: float,
    mask: Visibility,
) -> Tensor:
    """What is chosen on a GPU without the Triton forms: of the compiled form and those below it, the first that can."""
    arguments = (query, key, value, pre, post)
    if why_not_unasked(*arguments, mask=mask, dropout=0.0) is None:
        form = compiled_forward
    else:
        form = one_query_attention if query.shape[2] == 1 else chunked_attention
    return form(*arguments, scaling=scaling, mask=mask)


_examination = Examination(triton_attention, torch_attention)
verdicts = Verdicts(_examination.check, _examination.measure)


def why_not_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    mask: Visibility,
    dropout: float = 0.0,
) -> str | None:
    """
    Why the automatic choice passes over the Triton forms, as the end of a sentence; None if it takes them.

    The first call of a case outside of graphs and backward passes finds its verdict out. A prefill asks for the verdict
    on decoding too, since the steps that follow it are often compiled.
    """
    reason = why_not_triton(query, key, value, pre, post, mask=mask, dropout=dropout)
    if reason is not None:
        _say(reason)
        return reason
    case = case_of(query, key, value, pre, post, mask)
    index = query.device.index
    if is_tracing(query) or torch._C._current_graph_task_id() != -1:
        return _known_problem(index, *case.flat())
    verdict = find_out(index, case)
    if case.kind == PREFILL:
        find_out(index, case.as_decoding())
    return verdict.problem


def find_out(device_index: int | None, case: Case) -> Verdict:
    """The verdict on a case on one of the GPUs, which is checked if there is none yet."""

    def on_device() -> AbstractContextManager[Any]:
        return torch.cuda.device(device_index)

    return verdicts.find_out(machine(device_index), case, on_device)


@torch.compiler.assume_constant_result
def _known_problem(device_index: int | None, *flat_case: Any) -> str | None:
    """What is known where nothing can be found out: kernels cannot be timed while a graph is made."""
    case = Case.of_flat(*flat_case)  # a graph hands on plain values only
    verdict = verdicts.known(machine(device_index), case)
    if verdict is not None:
        return verdict.problem
    reason = (
        f"it was not checked yet for {describe(case)}, which cannot be done within a graph or a backward pass; run the "
        "model once before it is compiled"
    )
    _log_once(reason)
    return reason


@torch.compiler.assume_constant_result
def _say(reason: str) -> None:
    _log_once(reason)


@functools.cache
def _log_once(reason: str) -> None:
    logger.warning("Composed attention runs without its Triton form: %s.", reason)


@functools.cache
def machine(device_index: int | None) -> Machine:
    """One of the GPUs, and the versions of all that takes part."""
    return Machine(
        torch.cuda.get_device_name(device_index),
        _driver_version(),
        str(triton_version()),
        torch.__version__,
        f"{__version__} with kernels {_kernel_digest()}",
    )


def _driver_version() -> str:
    """Of the driver of NVIDIA on Linux; elsewhere what torch knows of it."""
    if _DRIVER.exists() and (found := re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", _DRIVER.read_text(encoding="utf-8"))):
        return found[1]
    if torch.version.hip is not None:
        return f"HIP {torch.version.hip}"
    return f"CUDA {torch._C._cuda_getDriverVersion()}"


def _kernel_digest() -> str:
    """A few digits that change whenever a kernel does."""
    digest = hashlib.sha256()
    for path in sorted(Path(str(ops.__file__)).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
