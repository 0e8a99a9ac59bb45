"""A minimal reader of the JAX golden checkpoints: one zarr array (or OCDBT entry) per leaf, scan axis 1."""

import json
from pathlib import Path

import numpy as np
import tensorstore
import torch

from dcformer import DCFormerConfig, DCFormerForCausalLM


def read_leaves(folder: Path) -> dict[str, np.ndarray]:
    """Every parameter leaf below a checkpoint folder, in float32, without the leading `params.`."""
    (item,) = (path for path in folder.rglob("*") if path.name in ("state", "default") and path.is_dir())
    names = [
        ".".join(key["key"] for key in entry["key_metadata"])
        for entry in json.loads((item / "_METADATA").read_text())["tree_metadata"].values()
    ]
    leaves = {}
    for name in names:
        if not name.startswith("params."):
            continue
        store = {"driver": "file", "path": str(item / name) + "/"}
        if (item / "manifest.ocdbt").exists():
            store = {"driver": "ocdbt", "base": f"file://{item}/", "path": name + "/"}
        array = tensorstore.open({"driver": "zarr", "kvstore": store}).result().read().result()
        leaves[name.removeprefix("params.")] = np.asarray(array).astype(np.float32)
    return leaves


def config_of(values: dict) -> DCFormerConfig:
    """The configuration with JAX's semantics: tanh GELU, one epsilon for all norms, exact window."""
    windows = values["window_size"]
    layer_types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return DCFormerConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["emb_dim"],
        intermediate_size=values["mlp_dim"],
        num_hidden_layers=values["num_decoder_layers"],
        num_attention_heads=values["num_query_heads"],
        head_dim=values["head_dim"],
        sliding_window=next((window for window in windows if window is not None), None),
        layer_types=layer_types * (values["num_decoder_layers"] // len(windows)),
        qk_norm=values["qk_norm"],
        norm_eps=1e-5,
        qk_norm_eps=1e-5,
        compose_activation="gelu_pytorch_tanh",
        compose_static=values["static_proj"],
        compose_pre=values.get("pre_compose", True),
        compose_post=values.get("post_compose", True),
    )


def state_dict_of(
    leaves: dict[str, np.ndarray], config: DCFormerConfig, layers_per_block: int
) -> dict[str, torch.Tensor]:
    """Our parameter names for the leaves of one scanned run; layer l is scan index l // n, sub-block l % n."""
    hidden = config.hidden_size
    state = {
        "model.embed_tokens.weight": leaves["token_embedder.embedding"],
        "model.norm.weight": leaves["decoder.decoder_norm.scale"],
        "lm_head.weight": leaves["decoder.logits_dense.kernel"].T,
    }
    for layer in range(config.num_hidden_layers):
        block, sub = divmod(layer, layers_per_block)

        def leaf(name, block=block):
            return np.take(leaves[f"decoder.layers.{name}"], block, axis=1)

        attention, mlp, ours = f"self_attention_{sub}", f"mlp_{sub}", f"model.layers.{layer}"
        state[f"{ours}.input_layernorm.weight"] = leaf(f"pre_self_attention_layer_norm_{sub}.scale")
        state[f"{ours}.post_attention_layernorm.weight"] = leaf(f"post_self_attention_layer_norm_{sub}.scale")
        projections = [leaf(f"{attention}.{name}.kernel").reshape(hidden, -1).T for name in ("query", "key", "value")]
        state[f"{ours}.self_attn.qkv_proj.weight"] = np.concatenate(projections)
        state[f"{ours}.self_attn.o_proj.weight"] = leaf(f"{attention}.out.kernel").reshape(-1, hidden).T
        if config.qk_norm:
            state[f"{ours}.self_attn.q_norm.weight"] = leaf(f"{attention}.q_norm.scale")
            state[f"{ours}.self_attn.k_norm.weight"] = leaf(f"{attention}.k_norm.scale")
        for ours_name, name in (("gate_proj", "wi_0"), ("up_proj", "wi_1"), ("down_proj", "wo")):
            state[f"{ours}.mlp.{ours_name}.weight"] = leaf(f"{mlp}.{name}.kernel").T
        if not config.composes_heads:
            continue
        operator = f"{attention}.AttentionOp_0"
        state[f"{ours}.self_attn.compose.hidden_weight"] = leaf(f"{operator}.dyn_w_proj.dw1.kernel")
        state[f"{ours}.self_attn.compose.low_rank_weight"] = leaf(f"{operator}.dyn_w_proj.qkw")
        state[f"{ours}.self_attn.compose.gate_weight"] = leaf(f"{operator}.dyn_w_proj.dd.kernel")
        if config.compose_static:
            static = [leaf(f"{operator}.{name}.w") for name in ("pre_proj", "post_proj")]
            state[f"{ours}.self_attn.compose.static_weight"] = np.stack(static)
    return {name: torch.tensor(np.ascontiguousarray(value)) for name, value in state.items()}


def load_model(folder: Path, info_folder: Path) -> DCFormerForCausalLM:
    """The float32 model of a golden configuration folder; its shapes come from `info_folder`/info.json."""
    values = json.loads((info_folder / "info.json").read_text())["config"]
    config = config_of(values)
    model = DCFormerForCausalLM(config)
    model.load_state_dict(state_dict_of(read_leaves(folder), config, values["num_layers_per_block"]))
    return model.eval()
