"""Operations of training per token, and with them tokens per second as a share of what the hardware could do (MFU)."""

from __future__ import annotations

import time
from functools import cache

import torch

from ..configuration_dcformer import DCFormerConfig


_MATMUL_SIZES = (128, 1024)
_LONG_SECONDS = 2e-3
# Dense matrix products in Tflop/s by the makers' data sheets: bfloat16 (with float32 sums), and TF32, which float32
# training is measured against whether or not it uses it. The first entry whose words are all in a GPU's name counts.
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
    Floating-point operations of training on one token: forward, and twice as many backward.

    Matrix products count two operations per multiplication; scores and weighted values count the keys that a query
    sees, causally and within its layer's window, on average over a row. A composition counts as in the paper: making
    its weights from the hidden states, and per pair of query and key 4 R operations per head for a low-rank projection
    and 2 for a gate, for each side and for each of the two places that are in use. The embedding's look-up, norms,
    activations, the softmax and the optimiser are left out. Packed documents count as one, and layers that gradient
    checkpointing computes again count once, as is the custom for MFU.

    Args:
        config (`DCFormerConfig`): Configuration of the model, of any architecture.
        sequence_length (`int`): Tokens of a row.

    Returns:
        `int`: Operations per token.

    Source: equation 11 of the paper, which counts a composition over all pairs but attention over causal ones; here
    both are over the pairs that are seen.
    """
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    query_size, key_value_size = heads * head_dim, config.num_key_value_heads * head_dim
    projections = hidden * (query_size + 2 * key_value_size) + query_size * hidden
    mlp = (3 if config.mlp_type == "gated" else 2) * hidden * config.intermediate_size
    mlp += hidden * (config.mlp_gate_dim or 0)
    compose_weights, compose_pair = _compose_flops(config)
    forward = 2 * hidden * config.vocab_size
    for layer_type in config.layer_types:
        window = config.sliding_window if layer_type == "sliding_attention" else None
        pairs = visible_pairs(sequence_length, window) / sequence_length
        forward += 2 * (projections + mlp) + compose_weights + pairs * (2 * 2 * query_size + compose_pair)
    return round(3 * forward)


def visible_pairs(length: int, sliding_window: int | None) -> int:
    """Pairs of a query and a key that it sees, causally and within the window, its own position included."""
    window = min(length, sliding_window or length)
    return window * (window + 1) // 2 + (length - window) * window


def _compose_flops(config: DCFormerConfig) -> tuple[int, int]:
    """Forward operations of a layer's compositions: per token, to make the weights; per pair, to mix all heads."""
    if not config.composes_heads:
        return 0, 0
    heads, rank = config.num_attention_heads, config.compose_rank
    group_heads = heads // config.compose_groups
    places = config.compose_pre + config.compose_post
    sides = places * (config.compose_query + config.compose_key)
    per_token = per_pair = 0
    if config.compose_low_rank:
        inner = 2 * rank * heads  # of all groups
        per_token += sides * 2 * (config.hidden_size * inner + inner * 2 * rank * group_heads)
        per_pair += sides * 4 * rank * heads
    if config.compose_gate:
        per_token += sides * 2 * config.hidden_size * heads
        per_pair += sides * 2 * heads
    if config.compose_static:
        per_pair += places * 2 * heads * group_heads
    return per_token, per_pair


class Throughput:
    """
    Tokens per second between two reports.

    Args:
        config (`DCFormerConfig`): Configuration of the model that is trained.
        sequence_length (`int`): Tokens of a row.
        precision (`str`): `"bf16"` or `"fp32"`, which the peak of the hardware depends on.
    """

    def __init__(self, config: DCFormerConfig, sequence_length: int, precision: str):
        self.flops_per_token = flops_per_token(config, sequence_length)
        self.precision = precision
        self.start()

    def start(self) -> None:
        """Count time from now on."""
        self._since = time.perf_counter()

    def report(self, tokens: int, devices: int) -> dict[str, float | None]:
        """
        Args:
            tokens (`int`): Tokens that all devices have trained on since the start or the last report.
            devices (`int`): Processes, each with a device of its own.

        Returns:
            `tokens_per_second` of all devices, and `mfu`, the share of their peak; `None` where that is not known.
        """
        now = time.perf_counter()
        tokens_per_second = tokens / max(now - self._since, 1e-9)
        peak = peak_flops(self.precision)
        self._since = time.perf_counter()  # the peak of a CPU is measured once, which takes its time
        mfu = None if peak is None else tokens_per_second * self.flops_per_token / (peak * devices)
        return {"tokens_per_second": tokens_per_second, "mfu": mfu}


def peak_flops(precision: str) -> float | None:
    """
    Operations per second of this process's device at best: of a GPU by its data sheet, `None` if that is not known; of
    a CPU as a matrix product reaches it with the threads in use, measured at the first call.

    Args:
        precision (`str`): `"bf16"`, or `"fp32"`, for which a GPU's TF32 counts.
    """
    if torch.cuda.is_available():
        return gpu_peak_flops(torch.cuda.get_device_name(), precision)
    return _measured_flops(torch.bfloat16 if precision == "bf16" else torch.float32, torch.get_num_threads())


def gpu_peak_flops(name: str, precision: str) -> float | None:
    """As `peak_flops`, of the GPU of a name as torch reports it."""
    words = name.replace("-", " ").split()
    if any(kind in words for kind in _SLOWER_KINDS):
        return None
    for gpu, (bfloat16, tf32) in _TERAFLOPS.items():
        if all(word in words for word in gpu.split()):
            return 1e12 * (bfloat16 if precision == "bf16" else tf32)
    return None


@cache
def _measured_flops(dtype: torch.dtype, threads: int) -> float:
    # A CPU without bfloat16 products takes seconds for what others do in milliseconds, and needs no larger ones.
    for size in _MATMUL_SIZES:
        left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        seconds = []
        for _ in range(10):
            start = time.perf_counter()
            left @ right
            seconds.append(time.perf_counter() - start)
        if min(seconds) > _LONG_SECONDS:
            break
    return 2 * size**3 / min(seconds)


__all__ = ["Throughput", "flops_per_token", "gpu_peak_flops", "peak_flops", "visible_pairs"]
