"""The way back: a Transformers folder as a checkpoint that the authors' MaxText fork, or any orbax, restores.

The arrays are those of `MAXTEXT_ROWS`, written in the same pieces in which they are read: one zarr chunk per layer, so
that no more than one layer's parameter is in memory.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from ..common.optional import import_optional
from ..configuration_dcformer import DCFormerConfig
from .convert import Progress, check_room, refuse_quantised
from .destination import Destination
from .formats.authors_torch import plan_torch
from .formats.config_file import read_config
from .formats.orbax_writer import create_array, orbax_tree, write_array
from .formats.safetensors_file import list_safetensors
from .formats.transformers_folder import local_folder
from .hash_check import check_kept, check_while_reading, file_digests
from .leaves import Leaf
from .mapping import MAXTEXT_ROWS, Row, axis_sizes, leaf_shape, piece_for
from .pieces import Box, Piece, dtype_name
from .plan import DTYPES, UNUSED_FILE, Plan
from .report_file import REPORT_FILE, remembered_source
from .stores import import_tensorstore
from .tensor_bytes import is_finite, not_finite_words


TRAIN_CONFIG_FILE = "train_config.yml"
_SCAN_AXIS = 1
_LARGEST_STEP = 2**31 - 1  # it is written as an int32
# What the authors' JAX code computes, without a setting for anything else.
_FIXED: dict[str, Any] = {"model_type": "dcformer", "norm_type": "rms_norm", "mlp_type": "gated", "hidden_act": "silu"}
_FIXED |= {"mlp_gate_dim": None, "position_embedding_type": "rope"}
_FIXED |= dict.fromkeys(("attention_bias", "mlp_bias", "parallel_residual", "tie_word_embeddings"), False)
_FIXED_ROPE = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1.0}
_FIXED_COMPOSITION: dict[str, Any] = {"compose_rank": 2, "compose_groups": 1}
_FIXED_COMPOSITION |= dict.fromkeys(("compose_query", "compose_key", "compose_low_rank", "compose_gate"), True)
_NEARLY_FIXED_COMPOSITION = {"compose_activation": "gelu_pytorch_tanh", "compose_norm_eps": 1e-6}
_ARCHITECTURE = {"decoder_block": "dcformer", "mlp_activations": ["silu", "linear"], "logits_via_embedding": False}


@dataclass
class MaxTextReport:
    """
    Attributes:
        destination (`str`): The run's checkpoints folder.
        step (`int`): Its only step.
        leaves: Per array: name, shape, dtype and the parameters it was made from.
        seconds (`float`), source_bytes (`int`): Time and bytes read of this run; not in the file.
    """

    destination: str
    step: int
    leaves: list[dict[str, Any]]
    seconds: float = field(default=0.0, compare=False)
    source_bytes: int = field(default=0, compare=False)


@dataclass
class _Target:
    """An array to write in chunks, one per layer; `kept` is it where the source holds it."""

    name: str
    shape: tuple[int, ...]
    chunks: list[tuple[Box, list[Piece]]]
    dtype: torch.dtype = torch.float32
    sources: list[str] = field(default_factory=list)
    kept: Leaf | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def connect(self, plan: Plan, kept: Leaf | None, param_dtype: str) -> None:
        """Find the parameters and the dtype; an array that gets neither parameters nor `kept` will be zeros."""
        parameters = dict.fromkeys(piece.parameter for _, pieces in self.chunks for piece in pieces)
        self.sources = [name for name in parameters if name in plan.parameters]
        # The authors' code creates qkw in bfloat16 and kernels in float32.
        dtype = torch.bfloat16 if self.name.endswith("qkw") else torch.float32
        if self.sources:
            dtype = reduce(torch.promote_types, [plan.parameters[name].dtype for name in self.sources])
        elif kept is not None and kept.shape == self.shape:
            self.kept, self.sources, dtype = kept, [UNUSED_FILE], kept.dtype
        self.dtype = DTYPES.get(param_dtype, dtype)


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
    force: bool = False,
    progress: Progress = lambda total: lambda nbytes: None,
) -> MaxTextReport:
    """
    Write a DCFormer as a parameter-only MaxText checkpoint, `destination/<step>/state`, and its `train_config.yml`.

    The folder is built beside the destination and renamed at the end. After an interruption, the same call resumes
    behind the last chunk that was written. Any failure but an interruption or a full disk leaves nothing behind.

    Args:
        source: Folder of this package or of the authors' torch files, or a name on the Hub. If it was converted, the
            hashes in its `conversion_report.json` must be those of the weights.
        destination: Folder to create, a run's `checkpoints`.
        step (`int`, *optional*): None: the step that the source was converted from, else 0.
        scan_layers (`bool`, defaults to `True`): Stack the layers along axis 1, as training with a scan does.
        layers_per_block (`int`, *optional*): Layers in a block. None: as in the checkpoint that the source was
            converted from, else the shortest period of the windows.
        param_dtype (`str`, defaults to `"keep"`): `"float32"`, `"bfloat16"`, or `"keep"` for that of each parameter.
        fused_qkv, fused_mlp (`bool`): Write `qkv_proj` and `wi` as the fused layers of MaxText hold them.
        approximate (`bool`): Write also what the JAX code computes with slightly different numbers.
        verify (`bool`, defaults to `True`): Refuse weights that hold NaN or infinity.
        force (`bool`): Replace a converted checkpoint at the destination, which stays until the new one is complete;
            refused if files lie in it that no conversion wrote, such as later steps.
        progress: Called with the number of bytes to read; returns a function that is called with every part done.

    Raises:
        FileNotFoundError, FileExistsError: if the source does not exist, or the destination does without `force`.
        ImportError: if tensorstore or msgpack is missing.
        ValueError: for a model that MaxText cannot express, with every reason; for a bad option.
    """
    started = time.monotonic()
    if param_dtype not in ("keep", "float32", "bfloat16"):
        raise ValueError(f"param_dtype must be keep, float32 or bfloat16, got {param_dtype!r}.")
    if step is not None and not 0 <= step <= _LARGEST_STEP:
        raise ValueError(f"step must be between 0 and {_LARGEST_STEP}, got {step}.")
    import_tensorstore()
    msgpack = import_optional("msgpack", "Writing MaxText checkpoints needs msgpack: pip install 'dcformer[convert]'.")
    folder = local_folder(source)
    target = Destination(destination, folder, force)
    config = read_config(folder / "config.json")
    _refuse_inexpressible(config, folder, fused_qkv, approximate)
    remembered = remembered_source(folder)
    per_block = _layers_per_block(config, layers_per_block, remembered.get("layers_per_block"))
    plan = plan_torch(folder)
    refuse_quantised(plan)
    check_while_reading(plan, folder)
    if step is None:
        step = remembered.get("step", 0)
        step = step if 0 <= step <= _LARGEST_STEP else 0
    targets = list(_targets(config, per_block, scan_layers, _rows(config, fused_qkv, fused_mlp)))
    unused = _unused_leaves(folder)
    for leaf in targets:
        leaf.connect(plan, unused.get(leaf.name), param_dtype)
    records = [
        {"name": leaf.name, "shape": list(leaf.shape), "dtype": dtype_name(leaf.dtype), "sources": leaf.sources}
        for leaf in targets
    ]
    total = sum(plan.parameters[name].nbytes for name in _parameters_of(targets))
    layout = {"scan_layers": scan_layers, "fused_qkv": fused_qkv, "fused_mlp": fused_mlp}
    train_config = _train_config(config, per_block, scan_layers) | layout
    fingerprint = {**plan.fingerprint(), "step": step, "leaves": records, "train_config": train_config}
    fingerprint["unused"] = {name: leaf.fingerprint() for name, leaf in unused.items()}
    log = target.progress / "chunks"
    with target.open(fingerprint, lambda: log.is_file() and log.stat().st_size > 0) as partial:
        item = partial / str(step) / "state"
        item.mkdir(parents=True, exist_ok=True)
        check_room(target, sum(leaf.nbytes for leaf in targets) if not log.is_file() else 0)
        _write_leaves(item, targets, plan, log, progress(total), verify)
        write_array(create_array(item / "step", (), (), torch.int32), torch.tensor(step, dtype=torch.int32))
        metadata, tree = orbax_tree([leaf.name for leaf in targets])
        (item / "_METADATA").write_text(json.dumps(metadata), encoding="utf-8")
        (item / "checkpoint").write_bytes(msgpack.packb(tree))
        (partial / TRAIN_CONFIG_FILE).write_text(yaml.safe_dump(train_config, sort_keys=False), encoding="utf-8")
        (partial / REPORT_FILE).unlink(missing_ok=True)  # of an earlier run, which ended before the renaming
        report = {"source": plan.source, "step": step, "leaves": records, "files": file_digests(partial)}
        (partial / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
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
        reasons.append(f"{'; '.join(close)} (approximate=True, or --approximate, accepts these slight differences)")
    if reasons:
        raise ValueError(f"{str(folder)!r} cannot be written as a MaxText checkpoint: {'; '.join(reasons)}.")


def _layers_per_block(config: DCFormerConfig, given: int | None, remembered: int | None) -> int:
    types, layers = config.layer_types or [], config.num_hidden_layers
    fitting = [n for n in range(1, layers + 1) if layers % n == 0 and types == types[:n] * (layers // n)]
    if given is not None and given not in fitting:
        choices = ", ".join(map(str, fitting))
        raise ValueError(f"layers_per_block must be {choices}, so that the windows repeat per block, got {given}.")
    if given is not None:
        return given
    # The windows of the folder may have been changed since it was converted.
    return remembered if remembered in fitting else fitting[0]


def _rows(config: DCFormerConfig, fused_qkv: bool, fused_mlp: bool) -> list[Row]:
    """The rows of the table that a run with these settings has."""
    static = config.composes_heads and config.compose_static
    has = dict.fromkeys((".query.", ".key.", ".value."), not fused_qkv) | {".qkv_proj.": fused_qkv}
    has |= dict.fromkeys((".wi_0.", ".wi_1."), not fused_mlp) | {".wi.": fused_mlp}
    has |= dict.fromkeys((".q_norm.", ".k_norm."), config.qk_norm)
    has |= {".pre_proj.": static and config.compose_pre, ".post_proj.": static and config.compose_post}
    return [row for row in MAXTEXT_ROWS if all(there for part, there in has.items() if part in row.leaf)]


def _targets(config: DCFormerConfig, n: int, scan_layers: bool, rows: list[Row]) -> Iterator[_Target]:
    """Every array, layer by layer in the order of the table, so that what one parameter fills comes together."""
    # The JAX code has the arrays of a composition also in a model that composes nothing.
    as_in_jax = copy(config)
    as_in_jax.compose_rank, as_in_jax.compose_groups = 2, 1
    sizes, blocks = axis_sizes(as_in_jax), config.num_hidden_layers // n
    axis = _SCAN_AXIS if scan_layers else None
    by_leaf = {leaf: list(its) for leaf, its in itertools.groupby(rows, lambda row: row.leaf)}

    def target(name: str, rows: list[Row], prefixes: list[str]) -> _Target:
        shape, chunks = leaf_shape(rows[0], sizes, axis, blocks), []
        for index, prefix in enumerate(prefixes):
            box = [(0, size) for size in shape]
            if rows[0].per_layer and axis is not None:
                box[axis] = (index, index + 1)
            pieces = [piece_for(row, name, prefix + row.parameter, sizes, axis, index) for row in rows]
            chunks.append((tuple(box), pieces))
        return _Target(name, shape, chunks)

    yield from (target(f"params.{leaf}", its, [""]) for leaf, its in by_leaf.items() if not its[0].per_layer)
    folders = {"layers": range(blocks)} if scan_layers else {f"layers_{block}": [block] for block in range(blocks)}
    for folder, sub in itertools.product(folders, range(n)):
        prefixes = [f"model.layers.{block * n + sub}." for block in folders[folder]]
        for leaf, its in by_leaf.items():
            if its[0].per_layer:
                yield target(f"params.decoder.{folder}.{leaf.replace('{sub}', str(sub))}", its, prefixes)


def _unused_leaves(folder: Path) -> dict[str, Leaf]:
    """The arrays without use for the model that a conversion has kept."""
    if not (folder / UNUSED_FILE).is_file():
        return {}
    return check_kept({leaf.name: leaf for leaf in list_safetensors(folder / UNUSED_FILE)}, folder)


def _parameters_of(targets: list[_Target]) -> set[str]:
    """The parameters that arrays are made from."""
    return {name for leaf in targets if leaf.kept is None for name in leaf.sources}


def _write_leaves(
    item: Path,
    targets: list[_Target],
    plan: Plan,
    log: Path,
    done: Callable[[int], None],
    only_finite: bool,
) -> None:
    """
    Layer by layer; zeros where the source has nothing.

    Args:
        log: Grows by a line with every chunk that is on the disk; what it counts already is not written again.
        done: Called with the bytes of every parameter that is read, or need not be.
        only_finite: Refuse NaN and infinity.
    """

    @lru_cache(maxsize=1)  # query, key and value come from one parameter, one after the other
    def read(parameter: str) -> Tensor:
        values = plan.read(parameter)
        if only_finite:
            _check_finite(parameter, values)
        done(values.nbytes)
        return values.flatten()

    for stale in item.rglob("*.__lock"):  # tensorstore's, of a process that was killed
        stale.unlink()
    longest = max(len(leaf.chunks) for leaf in targets)
    chunks = [(leaf, index) for index in range(longest) for leaf in targets if index < len(leaf.chunks)]
    finished = log.read_bytes().count(b"\n") if log.is_file() else 0
    needed = {piece.parameter for leaf, index in chunks[finished:] for piece in leaf.chunks[index][1]}
    done(sum(plan.parameters[name].nbytes for name in _parameters_of(targets) - needed))
    arrays = {leaf.name: create_array(item / leaf.name, leaf.shape, leaf.chunks[0][0], leaf.dtype) for leaf in targets}
    with log.open("ab", buffering=0) as lines:
        for leaf, index in chunks[finished:]:
            box, pieces = leaf.chunks[index]
            part = arrays[leaf.name][tuple(slice(*interval) for interval in box)]
            values = torch.zeros(part.shape, dtype=leaf.dtype)
            if leaf.kept is not None:
                values.copy_(leaf.kept.read(box))
            for piece in pieces if leaf.sources and leaf.kept is None else []:
                span = read(piece.parameter)[piece.offset : piece.offset + piece.size]
                piece.write_to_leaf(span, values, box)
            if only_finite:  # what is kept, and what a cast has made
                _check_finite(leaf.name, values)
            write_array(part, values)
            lines.write(b".\n")


def _check_finite(name: str, values: Tensor) -> None:
    if not is_finite(values):
        words = not_finite_words(name, [values.flatten()], tuple(values.shape))
        raise ValueError(f"{words}; pass --no-verify to convert it all the same.")


def _train_config(config: DCFormerConfig, n: int, scan_layers: bool) -> dict[str, Any]:
    length, composes, types = config.max_position_embeddings, config.composes_heads, config.layer_types or []
    return {
        **_ARCHITECTURE,
        "base_emb_dim": config.hidden_size,
        "base_num_query_heads": config.num_attention_heads,
        "base_num_kv_heads": config.num_key_value_heads,
        "base_mlp_dim": config.intermediate_size,
        **{key: getattr(config, key) for key in ("head_dim", "vocab_size", "qk_norm")},
        "normalization_layer_epsilon": config.norm_eps,
        # Without a scan, MaxText counts blocks here.
        "base_num_decoder_layers": config.num_hidden_layers // (1 if scan_layers else n),
        "num_layers_per_block": n,
        "param_scan_axis": _SCAN_AXIS,
        "window_size": [config.sliding_window if "sliding" in kind else None for kind in types[:n]],
        "static_proj": composes and config.compose_static,
        **{f"{stage}_compose": composes and getattr(config, f"compose_{stage}") for stage in ("pre", "post")},
        # The authors count the last token, which is only a target.
        "max_target_length": length + 1 if length > 2 and length & (length - 1) == 0 else length,
    }
