"""Transformers folders as checkpoints that the authors' MaxText fork, or any orbax, restores.

The arrays are those of `MAXTEXT_ROWS`, written one after the other with one zarr chunk per layer, so that no more than
one parameter is in memory.
"""

import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import yaml

from ..common.dtypes import dtype_name
from ..common.optional import import_optional
from ..configuration_dcformer import DCFormerConfig
from .arrays import SourceArray, open_safetensors
from .authors_torch import local_folder, open_torch, read_torch
from .beside import find_files, remembered_source, save_files
from .conversion_report import write_report
from .destination import Destination
from .mapping import MAXTEXT_ROWS, Row, array_shape, axis_sizes, parts_of
from .maxtext import SCAN_AXIS, TRAIN_CONFIG_FILE, run_settings
from .plan import DTYPES, UNUSED_FILE, Part, Plan, make_plan
from .stores import import_tensorstore
from .verify import Progress, refuse_changed
from .writer import not_finite_error


# The authors' JAX code computes this, without a setting for anything else.
_FIXED: dict[str, Any] = {"model_type": "dcformer", "norm_type": "rms_norm", "mlp_type": "gated", "hidden_act": "silu"}
_FIXED |= {"mlp_gate_dim": None, "position_embedding_type": "rope"}
_FIXED |= dict.fromkeys(("attention_bias", "mlp_bias", "parallel_residual", "tie_word_embeddings"), False)
_FIXED_ROPE = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1.0}
_FIXED_COMPOSITION: dict[str, Any] = {"compose_rank": 2, "compose_groups": 1, "compose_layers": None}
_FIXED_COMPOSITION |= dict.fromkeys(("compose_query", "compose_key", "compose_low_rank", "compose_gate"), True)
_NEARLY_FIXED_COMPOSITION = {"compose_activation": "gelu_pytorch_tanh", "compose_norm_eps": 1e-6}


@dataclass
class MaxTextReport:
    """The record of a conversion to MaxText."""

    destination: str  #: the run's checkpoints folder
    step: int  #: its only one
    arrays: list[dict[str, Any]]  #: per array: name, shape, dtype and the parameters it was made from
    seconds: float = 0.0  #: this and the rest are about this run, and not in the file
    source_bytes: int = 0
    was_complete: bool = False  #: whether an earlier run had done all but remove its notes


@dataclass(frozen=True)
class _Target:
    """
    An array to write: the parameters that it is made from, each with its part of the array. `sources` are those
    parameters that the source has, or [`UNUSED_FILE`]; without any, the array is zeros.
    """

    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]  #: a layer of a stack
    dtype: torch.dtype
    parts: list[tuple[str, Part]]
    sources: list[str]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def record(self) -> dict[str, Any]:
        """The entry of the array in the report."""
        return {"name": self.name, "shape": [*self.shape], "dtype": dtype_name(self.dtype), "sources": self.sources}


def convert_to_maxtext(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    step: int | None = None,
    scan_layers: bool = True,
    layers_per_block: int | None = None,
    param_dtype: str = "keep",
    fused_qkv: bool = False,
    fused_mlp: bool = False,
    approximate: bool = False,
    verify: bool = True,
    revision: str | None = None,
    force: bool = False,
    progress: Progress = lambda total: lambda nbytes: None,
) -> MaxTextReport:
    """
    Write a DCFormer as a parameter-only MaxText checkpoint, `destination/<step>/state`, and its `train_config.yml`.

    The folder is built beside the destination and renamed at the end. After an interruption, the same call checks the
    hashes of the finished arrays and writes the others.

    Args:
        source: Folder of this package or of the authors' torch files, or a name on the Hub. If it was converted, its
            files must be those of its `conversion_report.json`.
        destination: Folder to create, a run's `checkpoints`.
        step (*optional*): `None`: the step that the source was converted from, else 0.
        scan_layers (defaults to `True`): Stack the layers along axis 1, as training with a scan does.
        layers_per_block (*optional*): Layers in a block; `None`: as in the checkpoint that the source was converted
            from, else the shortest period of the windows.
        param_dtype (defaults to `"keep"`): `"float32"`, `"bfloat16"`, or `"keep"` for that of each parameter.
        fused_qkv, fused_mlp (default to `False`): Write `qkv_proj` and `wi` as MaxText's fused layers hold them.
        approximate (defaults to `False`): Write also models that the JAX code computes with slightly other numbers.
        verify (defaults to `True`): Refuse weights that hold NaN or infinity.
        revision (*optional*): Branch, tag or commit on the Hub; `None`: `main`.
        force (defaults to `False`): Replace a converted checkpoint at the destination, which stays until the new one is
            complete. A folder with files that no conversion wrote, such as later steps, is refused.
        progress (*optional*): Called with the number of bytes to write; returns a function that is called with every
            part done.

    Raises:
        FileNotFoundError, FileExistsError: if the source does not exist, or the destination does without `force`.
        ImportError: if tensorstore or msgpack is missing.
        ValueError: for a model that MaxText cannot express, with every reason; for a bad option.
    """
    started = time.monotonic()
    if param_dtype not in ("keep", "float32", "bfloat16"):
        raise ValueError(f"param_dtype must be keep, float32 or bfloat16, got {param_dtype!r}.")
    msgpack = import_optional("msgpack", "Writing a MaxText checkpoint", "convert")
    target = Destination(destination, source, force)
    folder = local_folder(source, revision)
    remembered = remembered_source(folder)
    step = remembered.get("step", 0) if step is None else step
    if type(step) is not int or not 0 <= step < 2**31:  # it names a folder, and is written as an int32
        raise ValueError(f"step must be a whole number from 0 to {2**31 - 1}, got {step!r}; give another (--step).")
    refuse_changed(folder)
    checkpoint = read_torch(open_torch(folder))
    plan = make_plan(checkpoint, files=find_files(folder, checkpoint.config))
    config = plan.config
    _refuse_inexpressible(config, folder, fused_qkv, approximate)
    per_block = _layers_per_block(config, layers_per_block, remembered.get("layers_per_block"))
    path = folder / UNUSED_FILE
    unused = open_safetensors(path) if path.is_file() else {}
    targets = list(_targets(plan, unused, _rows(config, fused_qkv, fused_mlp), per_block, scan_layers, param_dtype))
    records = [array.record for array in targets]
    layout = {"scan_layers": scan_layers, "fused_qkv": fused_qkv, "fused_mlp": fused_mlp}
    train_config = run_settings(config, per_block, **layout)
    fingerprint = plan.fingerprint | {"step": step, "arrays": records, "train_config": train_config, "verify": verify}
    total = sum(array.nbytes for array in targets)
    with target.open(fingerprint) as partial:
        if target.report is not None:
            return MaxTextReport(str(target.path), step, records, was_complete=True)
        item = partial / str(step) / "state"
        advance = progress(total)
        for array in targets:
            if array.name not in target.finished:
                _write_array(item / array.name, array, plan, unused, verify)
                target.finish(array.name, (item / array.name).rglob("*"), [])
            advance(array.nbytes)
        _create_array(item / "step", (), (), torch.int32).write(step).result()
        metadata, tree = orbax_tree([array.name for array in targets])
        (item / "_METADATA").write_text(json.dumps(metadata), encoding="utf-8")
        (item / "checkpoint").write_bytes(msgpack.packb(tree))
        (partial / TRAIN_CONFIG_FILE).write_text(yaml.safe_dump(train_config, sort_keys=False), encoding="utf-8")
        save_files(plan.files, config, partial)
        write_report(partial, {"source": plan.source.record, "step": step, "arrays": records})
    return MaxTextReport(str(target.path), step, records, time.monotonic() - started, total)


def _refuse_inexpressible(config: DCFormerConfig, folder: Path, fused_qkv: bool, approximate: bool) -> None:
    """Raise ValueError with all that MaxText has no setting for."""

    def differing(wanted: dict[str, Any]) -> list[str]:
        return [f"{name} is {values[name]!r}, not {value!r}" for name, value in wanted.items() if values[name] != value]

    values = {**_FIXED_ROPE, **(config.rope_parameters or {}), **config.to_dict()}
    reasons, close = differing(_FIXED), []
    if config.position_embedding_type == "rope":
        reasons += differing(_FIXED_ROPE)
    if fused_qkv and config.num_key_value_heads != config.num_attention_heads:
        reasons.append("fused_qkv needs as many key/value heads as query heads")
    if config.composes_heads:
        reasons += differing(_FIXED_COMPOSITION)
        close += differing(_NEARLY_FIXED_COMPOSITION)
    if config.qk_norm and config.norm_eps != config.qk_norm_eps:
        close.append(f"norm_eps is {config.norm_eps} but qk_norm_eps {config.qk_norm_eps}")
    if close and not approximate:
        reasons.append(f"slight differences, which approximate=True or --approximate accepts: {'; '.join(close)}")
    if reasons:
        raise ValueError(f"{str(folder)!r} cannot be written as a MaxText checkpoint: {'; '.join(reasons)}.")


def _layers_per_block(config: DCFormerConfig, given: int | None, remembered: int | None) -> int:
    types, layers = config.layer_types or [], config.num_hidden_layers
    fitting = [n for n in range(1, layers + 1) if layers % n == 0 and types == types[:n] * (layers // n)]
    if given is not None and given not in fitting:
        choices = ", ".join(map(str, fitting))
        raise ValueError(f"layers_per_block must be {choices}, so that the windows repeat per block, got {given}.")
    # The windows of the folder may have been changed since it was converted.
    return given or (remembered if remembered in fitting else fitting[0])


def _rows(config: DCFormerConfig, fused_qkv: bool, fused_mlp: bool) -> list[Row]:
    """The rows of the table that a run with these settings has."""
    static = config.composes_heads and config.compose_static
    has = dict.fromkeys((".query.", ".key.", ".value."), not fused_qkv) | {".qkv_proj.": fused_qkv}
    has |= dict.fromkeys((".wi_0.", ".wi_1."), not fused_mlp) | {".wi.": fused_mlp}
    has |= dict.fromkeys((".q_norm.", ".k_norm."), config.qk_norm)
    has |= {".pre_proj.": static and config.compose_pre, ".post_proj.": static and config.compose_post}
    return [row for row in MAXTEXT_ROWS if all(there for name, there in has.items() if name in row.array)]


def _targets(
    plan: Plan, unused: Mapping[str, SourceArray], rows: list[Row], n: int, scan_layers: bool, param_dtype: str
) -> Iterator[_Target]:
    """The arrays of a run that has these rows; `unused` are those that the model does not use, by name."""
    # The JAX code has the arrays of a composition also in a model that composes nothing.
    as_in_jax = copy(plan.config)
    as_in_jax.compose_rank, as_in_jax.compose_groups = 2, 1
    sizes, blocks = axis_sizes(as_in_jax), plan.config.num_hidden_layers // n
    by_array = {array: list(group) for array, group in itertools.groupby(rows, lambda row: row.array)}
    places: list[tuple[str, list[Row], list[int]]] = [
        (f"params.{array}", group, []) for array, group in by_array.items() if not group[0].per_layer
    ]
    stacks = {"layers": range(blocks)} if scan_layers else {f"layers_{block}": [block] for block in range(blocks)}
    for stack, sub in itertools.product(stacks, range(n)):
        layers = [block * n + sub for block in stacks[stack]]
        for array, group in by_array.items():
            if group[0].per_layer:
                name = array.format(sub=sub).replace("decoder.layers", f"decoder.{stack}")
                places.append((f"params.{name}", group, layers))
    axis = SCAN_AXIS if scan_layers else None
    for name, group, layers in places:
        parts = [pair for row in group for pair in parts_of(row, name, sizes, layers, axis)]
        sources = [parameter for parameter in dict.fromkeys(pair[0] for pair in parts) if parameter in plan.parameters]
        shape = array_shape(group[0], sizes, axis, blocks)
        # The authors' code creates qkw in bfloat16 and kernels in float32.
        dtype = torch.bfloat16 if name.endswith("qkw") else torch.float32
        if sources:
            dtype = reduce(torch.promote_types, [plan.parameters[parameter].dtype for parameter in sources])
        elif name in unused and unused[name].shape == shape:
            dtype, sources = unused[name].dtype, [UNUSED_FILE]
        chunk = array_shape(group[0], sizes, axis, 1)
        yield _Target(name, shape, chunk, DTYPES.get(param_dtype, dtype), parts, sources)


def _write_array(
    folder: Path, array: _Target, plan: Plan, unused: Mapping[str, SourceArray], only_finite: bool
) -> None:
    """Write an array part by part, zeros where the source has nothing."""
    stored = _create_array(folder, array.shape, array.chunk, array.dtype)
    for name, part in array.parts:
        if array.sources == [UNUSED_FILE]:
            values = unused[array.name].read(part.region)
        elif array.sources:
            values = part.from_parameter(plan.read_one(name))
        else:
            values = torch.zeros([stop - start for start, stop in part.region])
        values = values.to(array.dtype)
        if only_finite and not values.isfinite().all():  # a cast may have made infinity
            raise not_finite_error(array.name, values)
        if values.dtype == torch.bfloat16:  # which NumPy does not know
            values = values.view(torch.int16)
        content = values.numpy().view(stored.dtype.numpy_dtype)
        stored[tuple(slice(*interval) for interval in part.region)].write(content).result()


def _create_array(folder: Path, shape: tuple[int, ...], chunk: tuple[int, ...], dtype: torch.dtype) -> Any:
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "dtype": dtype_name(dtype),
        "metadata": {"shape": shape, "chunks": chunk, "compressor": {"id": "zstd", "level": 1}},
        # Zeros too are stored: readers of checkpoints take a chunk that is not there for a lost one.
        "store_data_equal_to_fill_value": True,
    }
    return import_tensorstore().open(spec, create=True).result()


def orbax_tree(names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    The contents of `_METADATA` and `checkpoint`, in which orbax keeps the arrays' names.

    The arrays are declared as NumPy's: restored without further instructions, JAX's would need a `_sharding` file that
    names the devices of the machine that reads.
    """
    entries: dict[str, Any] = {}
    tree: dict[str, Any] = {"opt_state": {}}
    types = {"step": "scalar", **dict.fromkeys(names, "np.ndarray"), "opt_state": "Dict"}
    for name, value_type in types.items():
        *above, last = keys = name.split(".")
        entries[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": value_type, "skip_deserialize": value_type == "Dict"},
        }
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node.setdefault(last, f"PLACEHOLDER://{name}")
    return {"tree_metadata": entries, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}, tree
