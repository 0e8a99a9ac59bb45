"""The way back: a Transformers folder as a checkpoint that the authors' MaxText fork, or any orbax, restores.

The arrays are those of `MAXTEXT_ROWS`, written in the same pieces in which they are read: one zarr chunk per layer, so
that no more than one layer's parameter is in memory.
"""

from __future__ import annotations

import json
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
from safetensors import safe_open
from torch import Tensor

from ..configuration_dcformer import DCFormerConfig
from .convert import Progress
from .destination import Destination
from .hub import local_folder, plan_hub, read_config
from .leaves import Leaf
from .mapping import MAXTEXT_ROWS, Row, axis_sizes, leaf_shape, piece_for
from .pieces import Box, Piece
from .plan import DTYPES, UNUSED_FILE, Plan
from .report import REPORT_FILE, dtype_name
from .stores import import_tensorstore
from .weights_folder import SafetensorsLeaf


TRAIN_CONFIG_FILE = "train_config.yml"
_SCAN_AXIS = 1
_ZARR_DTYPES = {
    torch.float64: "<f8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "bfloat16",
    torch.int32: "<i4",
}
# What the authors' JAX code computes, without a setting for anything else.
_FIXED = {
    "model_type": "dcformer",
    "attention_bias": False,
    "mlp_bias": False,
    "parallel_residual": False,
    "norm_type": "rms_norm",
    "mlp_type": "gated",
    "mlp_gate_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "position_embedding_type": "rope",
}
_FIXED_COMPOSITION = {
    "compose_query": True,
    "compose_key": True,
    "compose_low_rank": True,
    "compose_gate": True,
    "compose_rank": 2,
    "compose_groups": 1,
}
_NEARLY_FIXED_COMPOSITION = {"compose_activation": "gelu_pytorch_tanh", "compose_norm_eps": 1e-6}
# Keys of the training YAML that are fields of the configuration.
_SAME_IN_YAML = {
    "base_emb_dim": "hidden_size",
    "base_num_query_heads": "num_attention_heads",
    "base_num_kv_heads": "num_key_value_heads",
    "base_mlp_dim": "intermediate_size",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "normalization_layer_epsilon": "norm_eps",
    "qk_norm": "qk_norm",
}


@dataclass
class MaxTextReport:
    """
    Attributes:
        destination (`str`): The run's checkpoints folder.
        step (`int`): Its only step.
        leaves: Per array: name, shape, dtype and the parameters it was made from.
        seconds (`float`), source_bytes (`int`): Of this run; not in the file.
    """

    destination: str
    step: int
    leaves: list[dict[str, Any]]
    seconds: float = field(default=0.0, compare=False)
    source_bytes: int = field(default=0, compare=False)


@dataclass
class _Target:
    """An array to write; `chunks` are its parts, one per layer, with the pieces that fill them."""

    name: str
    shape: tuple[int, ...]
    chunks: list[tuple[Box, list[Piece]]]

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(piece.parameter for _, pieces in self.chunks for piece in pieces))


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
    force: bool = False,
    progress: Progress = lambda total: lambda nbytes: None,
) -> MaxTextReport:
    """
    Write a DCFormer as a parameter-only MaxText checkpoint: `destination/<step>/state`, with the `train_config.yml`
    that belongs to it.

    Args:
        source: Folder of this package or of the authors' torch files, or a name on the Hub.
        destination: Folder to create, a run's `checkpoints`.
        step (`int`, *optional*): None: the step that the source was converted from, else 0.
        scan_layers (`bool`, defaults to `True`): Stack the layers along axis 1, as training with a scan does.
        layers_per_block (`int`, *optional*): Layers in a block. None: the shortest period of the windows.
        param_dtype (`str`, defaults to `"keep"`): `"float32"`, `"bfloat16"`, or `"keep"` for that of each parameter.
        fused_qkv, fused_mlp (`bool`): Write `qkv_proj` and `wi` as the fused layers of MaxText hold them.
        approximate (`bool`): Write also what the JAX code computes with slightly different numbers.
        force (`bool`): Replace a converted checkpoint at the destination.
        progress: From the bytes to read to a function that is told of every part done.

    Raises:
        FileNotFoundError: if the source does not exist.
        FileExistsError: if the destination exists and `force` is not given.
        ImportError: if tensorstore or msgpack is missing.
        ValueError: for a model that MaxText cannot express, with every reason; for a bad option.
    """
    started = time.monotonic()
    if param_dtype not in ("keep", "float32", "bfloat16"):
        raise ValueError(f"param_dtype must be keep, float32 or bfloat16, got {param_dtype!r}.")
    if step is not None and step < 0:
        raise ValueError(f"step must not be negative, got {step}.")
    tensorstore, msgpack = import_tensorstore(), _import_msgpack()
    folder = local_folder(source)
    target = Destination(destination, folder, force)
    config = read_config(folder / "config.json")
    _refuse_inexpressible(config, folder, fused_qkv, approximate)
    per_block = _layers_per_block(config, layers_per_block)
    plan = plan_hub(folder)
    step = _source_step(folder) if step is None else step

    targets = list(_targets(config, per_block, scan_layers, _rows(config, fused_qkv, fused_mlp)))
    unused = {} if config.composes_heads else _unused_leaves(folder, targets)
    dtypes = {leaf.name: DTYPES.get(param_dtype, _source_dtype(leaf, plan, unused)) for leaf in targets}
    records = [
        {
            "name": leaf.name,
            "shape": list(leaf.shape),
            "dtype": dtype_name(dtypes[leaf.name]),
            "sources": [UNUSED_FILE] if leaf.name in unused else [s for s in leaf.sources if s in plan.parameters],
        }
        for leaf in targets
    ]
    read = {source for record in records for source in record["sources"]} & set(plan.parameters)
    total = sum(plan.parameters[name].nbytes for name in read)
    train_config = _train_config(config, per_block, scan_layers)
    train_config |= {"scan_layers": scan_layers, "fused_qkv": fused_qkv, "fused_mlp": fused_mlp}
    with target.open({**plan.fingerprint(), "step": step, "leaves": records}) as partial:
        item = partial / str(step) / "state"
        item.mkdir(parents=True)
        _write_leaves(tensorstore, item, targets, dtypes, plan, unused, progress(total))
        _write_array(_create(tensorstore, item / "step", (), (), torch.int32), torch.tensor(step, dtype=torch.int32))
        (item / "_METADATA").write_text(json.dumps(_orbax_metadata(list(dtypes))), encoding="utf-8")
        (item / "checkpoint").write_bytes(msgpack.packb(_placeholders(list(dtypes))))
        (partial / TRAIN_CONFIG_FILE).write_text(yaml.safe_dump(train_config, sort_keys=False), encoding="utf-8")
        values = {"source": plan.source, "step": step, "leaves": records}
        (partial / REPORT_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return MaxTextReport(str(target.path), step, records, time.monotonic() - started, total)


def _import_msgpack():
    try:
        import msgpack
    except ImportError as error:
        raise ImportError("Writing MaxText checkpoints needs msgpack: pip install 'dcformer[convert]'.") from error
    return msgpack


def _refuse_inexpressible(config: DCFormerConfig, folder: Path, fused_qkv: bool, approximate: bool) -> None:
    """Raise ValueError with all that MaxText has no setting for."""

    def differing(wanted: dict[str, Any]) -> list[str]:
        values = {name: getattr(config, name) for name in wanted}
        return [f"{name} is {values[name]!r}, not {wanted[name]!r}" for name in wanted if values[name] != wanted[name]]

    reasons, close = differing(_FIXED), []
    if config.position_embedding_type == "rope":
        rope = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1.0, **config.rope_parameters}
        if rope["rope_type"] != "default" or rope["rope_theta"] != 10000:
            reasons.append(f"rope_theta is {rope['rope_theta']}, of type {rope['rope_type']!r}, not 10000, 'default'")
        if int(config.head_dim * rope["partial_rotary_factor"]) != config.head_dim:
            reasons.append(f"partial_rotary_factor is {rope['partial_rotary_factor']}, not 1")
    if fused_qkv and config.num_key_value_heads != config.num_attention_heads:
        reasons.append("fused_qkv needs as many key/value heads as query heads")
    if config.composes_heads:
        reasons += differing(_FIXED_COMPOSITION)
        close += differing(_NEARLY_FIXED_COMPOSITION)
    if config.qk_norm and config.norm_eps != config.qk_norm_eps:
        close.append(f"norm_eps is {config.norm_eps} but qk_norm_eps {config.qk_norm_eps}")
    if close and not approximate:
        reasons.append(f"{'; '.join(close)} (approximate=True accepts these slight differences)")
    if reasons:
        raise ValueError(f"{str(folder)!r} cannot be written as a MaxText checkpoint: {'; '.join(reasons)}.")


def _layers_per_block(config: DCFormerConfig, given: int | None) -> int:
    """
    Raises:
        ValueError: if blocks of the given length do not divide the layers, or differ in their windows.
    """
    types, layers = config.layer_types, config.num_hidden_layers
    fitting = [n for n in range(1, layers + 1) if layers % n == 0 and types == types[:n] * (layers // n)]
    if given is None:
        return fitting[0]
    if given not in fitting:
        raise ValueError(
            f"layers_per_block must divide the {layers} layers into blocks with the same windows; that do "
            f"{', '.join(map(str, fitting))}, got {given}."
        )
    return given


def _source_step(folder: Path) -> int:
    """The step that the folder was converted from, 0 if it was not."""
    path = folder / REPORT_FILE
    if not path.is_file():
        return 0
    try:
        step = json.loads(path.read_text(encoding="utf-8"))["source"]["step"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no report of a conversion; remove it or give the step.") from error
    return step if isinstance(step, int) and step >= 0 else 0


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
    by_leaf: dict[str, list[Row]] = {}
    for row in rows:
        by_leaf.setdefault(row.leaf, []).append(row)

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
    for folder, its_blocks in folders.items():
        for sub in range(n):
            prefixes = [f"model.layers.{block * n + sub}." for block in its_blocks]
            for leaf, its in by_leaf.items():
                if its[0].per_layer:
                    yield target(f"params.decoder.{folder}.{leaf.replace('{sub}', str(sub))}", its, prefixes)


def _unused_leaves(folder: Path, targets: list[_Target]) -> dict[str, Leaf]:
    """The arrays without use for the model that a conversion from the same layout has kept."""
    path, shapes = folder / UNUSED_FILE, {leaf.name: leaf.shape for leaf in targets}
    if not path.is_file():
        return {}
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_slice(name) for name in file.keys() if name in shapes}  # noqa: SIM118
        leaves = [SafetensorsLeaf(name, path, part.get_shape(), part[:0].dtype) for name, part in stored.items()]
    return {leaf.name: leaf for leaf in leaves if leaf.shape == shapes[leaf.name]}


def _source_dtype(leaf: _Target, plan: Plan, unused: dict[str, Leaf]) -> torch.dtype:
    dtypes = [plan.parameters[name].dtype for name in leaf.sources if name in plan.parameters]
    if dtypes:
        return reduce(torch.promote_types, dtypes)
    # The authors' code creates qkw in bfloat16 and kernels in float32.
    default = torch.bfloat16 if leaf.name.endswith("qkw") else torch.float32
    return unused[leaf.name].dtype if leaf.name in unused else default


def _write_leaves(
    tensorstore,
    item: Path,
    targets: list[_Target],
    dtypes: dict[str, torch.dtype],
    plan: Plan,
    unused: dict[str, Leaf],
    done: Callable[[int], None],
) -> None:
    """Layer by layer; zeros where the source has nothing."""

    @lru_cache(maxsize=1)  # query, key and value come from one parameter, one after the other
    def read(parameter: str) -> Tensor:
        values = plan.read(parameter).flatten()
        done(values.nbytes)
        return values

    arrays = []
    for leaf in targets:
        chunk = [stop - start for start, stop in leaf.chunks[0][0]]
        arrays.append(_create(tensorstore, item / leaf.name, leaf.shape, chunk, dtypes[leaf.name]))
    for index in range(max(len(leaf.chunks) for leaf in targets)):
        for leaf, array in zip(targets, arrays):
            if index >= len(leaf.chunks):
                continue
            box, pieces = leaf.chunks[index]
            values = torch.zeros([stop - start for start, stop in box], dtype=dtypes[leaf.name])
            if leaf.name in unused:
                values.copy_(unused[leaf.name].read(box))
            for piece in pieces:
                if piece.parameter in plan.parameters:
                    run = read(piece.parameter)[piece.offset : piece.offset + piece.size]
                    piece.write_to_leaf(run, values, box)
            _write_array(array[tuple(slice(*interval) for interval in box)], values)


def _create(tensorstore, folder: Path, shape, chunk, dtype: torch.dtype):
    metadata = {
        "shape": list(shape),
        "chunks": list(chunk),
        "dtype": _ZARR_DTYPES[dtype],
        "compressor": {"id": "zstd", "level": 1},
        "fill_value": None,
    }
    kvstore = {"driver": "file", "path": f"{folder}/"}
    # Readers of checkpoints take a chunk that is not there for a lost one.
    spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata, "store_data_equal_to_fill_value": True}
    return tensorstore.open(spec, create=True).result()


def _write_array(array, values: Tensor) -> None:
    if values.dtype == torch.bfloat16:
        array.write(values.view(torch.int16).numpy().view(array.dtype.numpy_dtype)).result()
    else:
        array.write(values.numpy()).result()


def _orbax_metadata(names: list[str]) -> dict[str, Any]:
    """
    The tree for orbax. The arrays are declared as NumPy's: restored without further instructions, JAX's would need a
    `_sharding` file that names the devices of the machine that reads.
    """

    def entry(name: str, value_type: str) -> tuple[str, dict]:
        keys = name.split(".")
        return str(tuple(keys)), {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": value_type, "skip_deserialize": value_type == "Dict"},
        }

    entries = [entry("step", "scalar"), *(entry(name, "np.ndarray") for name in names), entry("opt_state", "Dict")]
    return {"tree_metadata": dict(entries), "use_zarr3": False}


def _placeholders(names: list[str]) -> dict[str, Any]:
    """What orbax keeps of the tree in the file `checkpoint`."""
    tree: dict[str, Any] = {"opt_state": {}}
    for name in [*names, "step"]:
        *above, last = name.split(".")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = f"PLACEHOLDER://{name}"
    return tree


def _train_config(config: DCFormerConfig, n: int, scan_layers: bool) -> dict[str, Any]:
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    length, composes = config.max_position_embeddings, config.composes_heads
    return {
        "decoder_block": "dcformer",
        **{key: getattr(config, name) for key, name in _SAME_IN_YAML.items()},
        # Without a scan, MaxText counts blocks here.
        "base_num_decoder_layers": config.num_hidden_layers // (1 if scan_layers else n),
        "num_layers_per_block": n,
        "window_size": [windows[layer_type] for layer_type in config.layer_types[:n]],
        "static_proj": composes and config.compose_static,
        "pre_compose": composes and config.compose_pre,
        "post_compose": composes and config.compose_post,
        "mlp_activations": ["silu", "linear"],
        "param_scan_axis": _SCAN_AXIS,
        # The authors count the last token, which is only a target.
        "max_target_length": length + 1 if length > 2 and length & (length - 1) == 0 else length,
        "logits_via_embedding": False,
    }
