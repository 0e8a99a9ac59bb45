"""The runs of the reference implementations whose weights and logits are at hand, and how near ours must come."""

import json
from pathlib import Path

from dcformer.conversion import ConversionReport, convert_maxtext


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


def convert_jax(golden: Path, name: str, folder: Path, **options) -> ConversionReport:
    """Convert a run, by a training YAML, beside the folder, with what its arrays cannot tell."""
    config = json.loads((golden / "A_jax" / JAX_RUNS[name] / "info.json").read_text())["config"]
    keys = ("window_size", "num_layers_per_block", "pre_compose", "post_compose")
    train_config = folder.with_name("run.yml")
    train_config.write_text(json.dumps({key: config[key] for key in keys if key in config}))
    return convert_maxtext(golden / "A_jax" / name / "checkpoints", folder, train_config=train_config, **options)
