"""The runs of the reference implementations whose weights and logits are at hand, and how near ours must come."""

TOLERANCE = 5e-5
# Folder of the weights -> folder of info.json; the variants are the same run written in other formats.
JAX_RUNS = {name: name for name in ("A1", "A2", "A3", "A4", "A5", "A6")} | {
    "A1_param_only": "A1",
    "A3_default": "A3",
    "A3_ocdbt": "A3",
    "A3_sharded": "A3",
}
TORCH_RUNS = {
    "B1_dcformer_9769ae6": "logits_decode_short",
    "B2_dcpythia": "logits_decode_short",
    "B3_dcformer_head": "logits_train_f32_winexact",
}
