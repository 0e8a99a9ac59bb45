"""A small PAX checkpoint: its arrays, and its configuration in the authors' keys."""

import numpy as np


PAX_ROOT = "state.mdl_vars.params.lm."
PAX_MLP = PAX_ROOT + "transformer.repeat.sub.x_layers_0.ff_layer.ffn_layer1.linear.w"
PAX_CONFIG = {"vocab_size": 30, "n_layer": 2, "n_head": 4, "dim": 16, "intermediate_size": 24, "norm_eps": 1e-6}
PAX_CONFIG |= {"window_size": 6, "window_type": "LG", "use_qk_norm": True, "block_size": 64, "is_training": True}
# Of a training run, which is not converted.
PAX_STATE = {"step": np.array(7, np.int32), "opt_states_0.no_prefix_0.count": np.zeros((), np.int32)}


def pax_arrays():
    """Random arrays of a block of two layers, by full name; axis 0 of those of a layer is the block."""
    generator = np.random.default_rng(3)
    in_layer = {
        "layer_norm.scale": (16,),
        "ff_layer.layer_norm.scale": (16,),
        **{f"self_attention.{kind}.w": (16, 4, 4) for kind in ("query", "key", "value", "post")},
        "self_attention.q_norm.scale": (4,),
        "self_attention.k_norm.scale": (4,),
        "self_attention.dyn_w_proj.dw1": (16, 1, 4, 16),
        "self_attention.dyn_w_proj.qkw": (1, 4, 16, 4, 4),
        "self_attention.dyn_w_proj.dd": (16, 1, 16),
        "ff_layer.ffn_layer1_gate.linear.w": (16, 24),
        "ff_layer.ffn_layer1.linear.w": (16, 24),
        "ff_layer.ffn_layer2.linear.w": (24, 16),
    }
    shapes = {"embedding_lookup.emb_var": (32, 16), "final_ln.scale": (16,), "softmax.logits_ffn.linear.w": (16, 32)}
    for sub in range(2):
        shapes |= {f"transformer.repeat.sub.x_layers_{sub}.{name}": (1, *shape) for name, shape in in_layer.items()}
    return {PAX_ROOT + name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
