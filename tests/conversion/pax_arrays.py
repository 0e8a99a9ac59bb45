"""A small PAX checkpoint: its arrays, and its configuration in the authors' keys."""

import numpy as np


PAX_ROOT = "state.mdl_vars.params.lm."
PAX_MLP = PAX_ROOT + "transformer.repeat.sub.x_layers_0.ff_layer.ffn_layer1.linear.w"
PAX_CONFIG = {
    "vocab_size": 30,
    "n_layer": 2,
    "n_head": 4,
    "dim": 16,
    "intermediate_size": 24,
    "window_size": 6,
    "window_type": "LG",
    "use_qk_norm": True,
    "norm_eps": 1e-6,
    "block_size": 64,
    "is_training": True,
}
# Of a training run, which is not converted.
PAX_STATE = {"step": np.array(7, np.int32), "opt_states_0.no_prefix_0.count": np.zeros((), np.int32)}


def pax_arrays():
    generator = np.random.default_rng(3)
    shapes = {"embedding_lookup.emb_var": (32, 16), "final_ln.scale": (16,), "softmax.logits_ffn.linear.w": (16, 32)}
    for sub in range(2):
        layer = f"transformer.repeat.sub.x_layers_{sub}"
        shapes |= {
            f"{layer}.layer_norm.scale": (1, 16),
            f"{layer}.ff_layer.layer_norm.scale": (1, 16),
            f"{layer}.self_attention.query.w": (1, 16, 4, 4),
            f"{layer}.self_attention.key.w": (1, 16, 4, 4),
            f"{layer}.self_attention.value.w": (1, 16, 4, 4),
            f"{layer}.self_attention.post.w": (1, 16, 4, 4),
            f"{layer}.self_attention.q_norm.scale": (1, 4),
            f"{layer}.self_attention.k_norm.scale": (1, 4),
            f"{layer}.self_attention.dyn_w_proj.dw1": (1, 16, 1, 4, 16),
            f"{layer}.self_attention.dyn_w_proj.qkw": (1, 1, 4, 16, 4, 4),
            f"{layer}.self_attention.dyn_w_proj.dd": (1, 16, 1, 16),
            f"{layer}.ff_layer.ffn_layer1_gate.linear.w": (1, 16, 24),
            f"{layer}.ff_layer.ffn_layer1.linear.w": (1, 16, 24),
            f"{layer}.ff_layer.ffn_layer2.linear.w": (1, 24, 16),
        }
    return {PAX_ROOT + name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
