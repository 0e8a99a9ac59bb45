"""Synthetic MaxText checkpoints in orbax's layouts, written with tensorstore alone; shapes as in the authors' runs."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import tensorstore


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def write_checkpoint(folder, leaves, *, layout="zarr", chunks=None, metadata=True, fill=None):
    """
    Write arrays, by dotted names, as the folder of one item of an orbax step.

    Args:
        layout: `"zarr"` (a folder per array), `"ocdbt"` (one database of zarr 2 arrays) or `"zarr3"`.
        chunks: Function from name and shape to the shape of a chunk. None: one chunk an array.
        metadata: Whether to write `_METADATA`.
        fill: The fill value, of which chunks are not stored; None: all chunks are, as by orbax.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # One commit for the whole database.
    transaction = tensorstore.Transaction() if layout == "ocdbt" else None
    for name, values in leaves.items():
        values = np.asarray(values)
        chunk = [max(1, size) for size in (chunks(name, values.shape) if chunks else values.shape)]
        kvstore = {"driver": "file", "path": f"{folder}/{name}/"}
        if layout == "ocdbt":
            base, config = {"driver": "file", "path": f"{folder}/"}, {"max_inline_value_bytes": 0}
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/", "config": config}
        spec = {"driver": "zarr3" if layout == "zarr3" else "zarr", "kvstore": kvstore}
        if layout != "zarr3":
            spec["metadata"] = {"compressor": {"id": "zstd", "level": 1}}
        options = {} if fill is None else {"fill_value": np.asarray(fill, values.dtype)}
        array = tensorstore.open(
            spec | {"store_data_equal_to_fill_value": fill is None},
            dtype=values.dtype,
            shape=values.shape,
            chunk_layout=tensorstore.ChunkLayout(chunk_shape=chunk),
            create=True,
            delete_existing=True,
            transaction=transaction,
            **options,
        ).result()
        array.write(values).result()
    if transaction is not None:
        transaction.commit_sync()
    if metadata:
        write_metadata(folder, leaves, layout == "zarr3", fill is None)


def write_metadata(folder, names, use_zarr3=False, stores_all=True):
    """orbax's `_METADATA` for arrays of these names; `stores_all` declares that no chunk is left out."""
    tree = {}
    for name in names:
        path = tuple(name.split("."))
        tree[str(path)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in path],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
    for kind in ("Dict", "None", "List", "Tuple"):  # empty ones, which are no arrays
        keys, value = [{"key": "opt_state", "key_type": 2}, {"key": kind, "key_type": 2}], {"value_type": kind}
        tree[f"('opt_state', '{kind}')"] = {"key_metadata": keys, "value_metadata": value | {"skip_deserialize": False}}
    values = {"tree_metadata": tree, "use_zarr3": use_zarr3, "store_array_data_equal_to_fill_value": stores_all}
    Path(folder, "_METADATA").write_text(json.dumps(values), encoding="utf-8")


SIZES = {"layers": 4, "per_block": 2, "embed": 16, "heads": 4, "channels": 4, "mlp": 24, "vocab": 32}


def maxtext_leaves(seed=0, *, qk_norm=True, static=False, rank=2, groups=1, optimizer=False, **sizes):
    """Random arrays of a MaxText DCFormer, by full name; `optimizer` adds the step and two moments of each."""
    generator = np.random.default_rng(seed)
    layers, per_block, embed, heads, channels, mlp, vocab = (SIZES | sizes).values()
    per_group, inner = heads // groups, rank * 2 * (heads // groups)
    shapes = {
        "token_embedder.embedding": (vocab, embed),
        "decoder.logits_dense.kernel": (embed, vocab),
        "decoder.decoder_norm.scale": (embed,),
    }
    attention, operator = "self_attention_{sub}", "self_attention_{sub}.AttentionOp_0"
    in_layer = {
        "pre_self_attention_layer_norm_{sub}.scale": (embed,),
        "post_self_attention_layer_norm_{sub}.scale": (embed,),
        **{f"{attention}.{kind}.kernel": (embed, heads, channels) for kind in ("query", "key", "value")},
        f"{attention}.out.kernel": (heads, channels, embed),
        **{f"{attention}.{letter}_norm.scale": (channels,) for letter in "qk" if qk_norm},
        f"{operator}.dyn_w_proj.dw1.kernel": (embed, groups, 4, inner),
        f"{operator}.dyn_w_proj.qkw": (groups, 4, inner, 2 * rank, per_group),
        f"{operator}.dyn_w_proj.dd.kernel": (embed, groups, 4 * per_group),
        **{f"{operator}.{stage}_proj.w": (groups, per_group, per_group) for stage in ("pre", "post") if static},
        "mlp_{sub}.wi_0.kernel": (embed, mlp),
        "mlp_{sub}.wi_1.kernel": (embed, mlp),
        "mlp_{sub}.wo.kernel": (mlp, embed),
    }
    for sub in range(per_block):
        for name, (first, *rest) in in_layer.items():  # the second axis is the scan's
            shapes[f"decoder.layers.{name.format(sub=sub)}"] = (first, layers // per_block, *rest)
    leaves = {}
    for name, shape in shapes.items():
        values = name.endswith("scale") + 0.3 * generator.standard_normal(shape)
        leaves[name] = values.astype(BFLOAT16 if name.endswith(("qkw", "_proj.w")) else np.float32)
    named = {f"params.{name}": values for name, values in leaves.items()}
    if optimizer:
        named["step"] = np.int32(7)
        named["opt_state.count"] = np.int32(7)
        for moment in ("mu", "nu"):
            named |= {f"opt_state.{moment}.{name}": np.full_like(values, 1e-3) for name, values in leaves.items()}
    return named


def relaid(leaves, *, per_block=2, scan=True, stack_axis=1, fused_qkv=False, fused_mlp=False, root="params."):
    """The same parameters as another run holds them: in other blocks, or every block or projection in an array."""
    laid, layers = {}, [{} for _ in range(4)]
    for name, values in leaves.items():
        if match := re.fullmatch(r"params\.decoder\.layers\.(\w+?)_(\d)\.(.+)", name):
            for block in range(values.shape[1]):
                layers[2 * block + int(match[2])][match[1], match[3]] = values[:, block]
        else:
            laid[re.sub(r"^params\.", root, name)] = values
    for layer in layers:
        for is_fused, part, fused, names in (
            (fused_qkv, "self_attention", "qkv_proj", ("query", "key", "value")),
            (fused_mlp, "mlp", "wi", ("wi_0", "wi_1")),
        ):
            if is_fused:
                parts = [layer.pop((part, f"{name}.kernel")) for name in names]
                layer[part, f"{fused}.kernel"] = np.stack(parts, axis=1)
    for sub in range(per_block):
        for part, name in layers[0]:
            blocks = [layer[part, name] for layer in layers[sub::per_block]]
            if scan:
                laid[f"{root}decoder.layers.{part}_{sub}.{name}"] = np.stack(blocks, stack_axis)
            else:
                laid |= {f"{root}decoder.layers_{i}.{part}_{sub}.{name}": block for i, block in enumerate(blocks)}
    return laid
