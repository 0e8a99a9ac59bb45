"""FLOPs of training per token, and the peak of the hardware that they are compared with (MFU)."""

import time

import torch

from ..configuration_dcformer import DCFormerConfig
from ..kernels import has_bfloat16_products


# Dense matrix products in Tflop/s by the makers' data sheets: bfloat16 (with float32 sums), and TF32, which float32
# training is measured against whether or not it uses it. The first entry with all its words in a GPU's name counts.
_TERAFLOPS = {
    "B200": (2250.0, 1125.0),
    "H200 NVL": (835.0, 417.5),
    "H200": (989.5, 494.5),
    "H100 NVL": (835.0, 417.5),
    "H100 PCIe": (756.0, 378.0),
    "H100": (989.5, 494.5),
    "A100": (312.0, 156.0),
    "A40": (149.7, 74.8),
    "A6000": (154.8, 77.4),
    "L40S": (362.0, 183.0),
    "L40": (181.0, 90.5),
    "L4": (121.0, 60.0),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
}
_SLOWER_KINDS = ("Laptop", "MIG", "D")  # a slower GPU, or a part of one, under the same name


def flops_per_token(config: DCFormerConfig, sequence_length: int) -> int:
    """
    Count the FLOPs of training on one token: forward, and twice as many backward.

    Matrix products count two FLOPs per multiplication; scores and weighted values count the keys that a query sees,
    causally and within the window of its layer, on average over a row. Composition counts computing its weights, and
    per pair of query and key 4 R FLOPs per head for a low-rank projection and 2 for a gate, in every branch that is on.
    Not counted: the embedding, norms, activations, the softmax, the optimiser. Packed documents count as one, and
    layers that gradient checkpointing recomputes count once, as is usual for MFU.

    Source: equation 11 of the paper, which counts composition over all pairs but attention over causal ones; here both
    are over the pairs that are seen.
    """
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    query_size, key_value_size = heads * head_dim, config.num_key_value_heads * head_dim
    projections = 2 * hidden * (query_size + key_value_size)
    mlp = hidden * ((3 if config.mlp_type == "gated" else 2) * config.intermediate_size + (config.mlp_gate_dim or 0))
    forward: float = 2 * hidden * config.vocab_size
    for layer_idx, layer_type in enumerate(config.layer_types):
        compose_weights, compose_pair = _compose_flops(config) if config.composes_layer(layer_idx) else (0, 0)
        window = config.sliding_window if layer_type == "sliding_attention" else None
        pairs = visible_pairs(sequence_length, window) / sequence_length
        forward += 2 * (projections + mlp) + compose_weights + pairs * (2 * 2 * query_size + compose_pair)
    return round(3 * forward)


def visible_pairs(length: int, sliding_window: int | None) -> int:
    """Count the pairs of a query and a key that it sees, causally and within the window, itself included."""
    window = min(length, sliding_window or length)
    return window * (window + 1) // 2 + (length - window) * window


def _compose_flops(config: DCFormerConfig) -> tuple[int, int]:
    """Forward FLOPs of composition in a layer: per token, to compute the weights; per pair, to mix all heads."""
    heads, rank, stages = config.num_attention_heads, config.compose_rank, config.compose_pre + config.compose_post
    group_heads = heads // config.compose_groups
    branches = stages * (config.compose_query + config.compose_key)
    per_token = per_pair = 0
    if config.compose_low_rank:
        inner = 2 * rank * heads  # of all groups
        per_token += branches * 2 * (config.hidden_size * inner + inner * 2 * rank * group_heads)
        per_pair += branches * 4 * rank * heads
    if config.compose_gate:
        per_token += branches * 2 * config.hidden_size * heads
        per_pair += branches * 2 * heads
    if config.compose_static:
        per_pair += stages * 2 * heads * group_heads
    return per_token, per_pair


def resolve_precision(precision: str) -> str:
    """`"auto"` resolved for this process's device, as `"bf16"` or `"fp32"`; any other precision as it is."""
    if precision != "auto":
        return precision
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if has_bfloat16_products() else "fp32"


def peak_flops(precision: str, gpu: str | None = None) -> float | None:
    """
    Peak FLOPs per second of a GPU, by its data sheet; `None` if that is not known, or without a GPU.

    Args:
        precision: `"bf16"`, `"fp32"`, for which TF32 counts, or `"auto"`.
        gpu (*optional*): As `torch.cuda.get_device_name` gives it; `None`: this process's.
    """
    if gpu is None and not torch.cuda.is_available():
        return None
    words = (gpu or torch.cuda.get_device_name()).replace("-", " ").split()
    if any(kind in words for kind in _SLOWER_KINDS):
        return None
    for name, (bfloat16, tf32) in _TERAFLOPS.items():
        if all(word in words for word in name.split()):
            return 1e12 * (bfloat16 if resolve_precision(precision) == "bf16" else tf32)
    return None


class TrainingClock:
    """Seconds of training, without evaluation and saving: call `lap` before these and `start` after them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.start()

    def start(self) -> None:
        """Leave out the time since the last lap."""
        self._since = time.perf_counter()

    def lap(self) -> None:
        """Add the time since the last lap or start."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = time.perf_counter()
        self.seconds += now - self._since
        self._since = now
