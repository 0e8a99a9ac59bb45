"""Versions and devices, and whether kernels compute here what plain PyTorch does."""

import copy
import importlib.metadata
import math
import platform
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import public as api
from ..modeling_dcformer import DCFormerAttention, DCFormerRotaryEmbedding
from ..version_dcformer import __version__


PACKAGES = ["torch", "transformers", "triton", "accelerate", "datasets", "lm-eval", "vllm"]
PUBLISHED = "dcformer-2.8b", "dcpythia-6.9b"  # whose weights are on the Hub
LENGTH, HIDDEN = 272, 128  # keys, more than a window; and of layers of which only the heads have the published sizes
MOST_SECONDS = 50  # after which no row begins: on a GPU the first run compiles
# Errors are root mean squares, relative to plain PyTorch in float32, from which float32 differs by the order of sums.
MOST_IN_FLOAT32, MOST_OF_PLAIN = 1e-5, 2


def described(device: torch.device) -> Iterator[str]:
    """Yield lines with the versions, the devices, and which kernels are chosen on one."""
    yield f"dcformer {__version__}, Python {platform.python_version()}, {platform.platform()}"
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} is not installed"
    yield f"CPU: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        yield f"cuda:{index}: {torch.cuda.get_device_name(index)}, compute capability {capability}"
    name, layer, _ = next(_published_layers())
    step = [each.bfloat16() for each in _projected(layer, torch.zeros(1, 1, HIDDEN))]
    on_cpu: Any = (*_together(step), layer.scaling, api.Visibility(1, 1))
    yield f"C++ library: {api.implementations()['native'].why_not(api.AttentionInputs(*on_cpu)) or 'loaded'}"
    yield f"For a decoding step of {name} in bfloat16 on {device}:"
    for backend, reason in api.explain_choice(*_together([each.to(device) for each in step])):
        yield f"  {backend}: {reason or 'chosen'}"


def count_wrong(device: torch.device) -> int:
    """Print a row for each shape and number type as it is compared; return how many are wrong."""
    rows = [(dtype, *each) for each in _published_layers() for dtype in ("bfloat16", "float32")]
    wrong, end = 0, time.monotonic() + MOST_SECONDS
    print("Errors of projections and attention, and in parentheses the largest that is not WRONG:")
    for number, (dtype, name, layer, rotary) in enumerate(rows):
        if time.monotonic() > end:
            left = f"{len(rows) - number} of {len(rows)} rows"
            print(f"{left} were not reached in {MOST_SECONDS} seconds; on a GPU the next run has less to compile.")
            break
        backend, errors = _compare(layer, rotary, dtype, device)
        cells = (f"{passed} {error:.1e} ({most:.1e})" for passed, (error, most) in errors.items())
        shape = f"{layer.num_heads} x {layer.head_dim}, window {layer.sliding_window}"
        row = f"{name:13} {shape:21} {dtype:8} {backend:6} {', '.join(cells)}"
        is_wrong = any(error > most for error, most in errors.values())
        print(row + "  WRONG" * is_wrong, flush=True)
        wrong += is_wrong
    return wrong


def _published_layers() -> Iterator[tuple[str, Any, Any]]:
    """Attention with random weights, and its rotary embedding, for each shape of heads, first of published weights."""
    families = {name: family for family in (api.DCFormerConfig, api.DCPythiaConfig) for name in family.presets()}
    seen = set()
    for name in sorted(families, key=lambda name: (name not in PUBLISHED, name)):
        head_dim = families[name].from_preset(name).head_dim
        config = families[name].from_preset(name, hidden_size=HIDDEN, head_dim=head_dim)
        for number, kind in enumerate(config.layer_types[:2]):  # one of each kind
            if (shape := (config.num_attention_heads, head_dim, kind)) not in seen:
                seen.add(shape)
                layer: Any = DCFormerAttention(config, number)
                layer.o_proj = None
                for parameter in layer.parameters():  # not the initial ones, which compose next to nothing
                    parameter.data.normal_(std={1: 1.0, 5: 1 / HIDDEN}.get(parameter.dim(), HIDDEN**-0.5))
                yield name, layer, DCFormerRotaryEmbedding(config)


def _projected(layer: Any, states: Tensor, positions: Any = None, implementation: str = "dcmha_plain") -> list[Tensor]:
    """Queries, keys and values, then the factors of queries and keys before the softmax, and those after it."""
    query, key, value, pre, post = layer.project(states, positions, implementation)
    return [query, key, value, *(side.factors for stage in (pre, post) for side in (stage.query, stage.key))]


def _together(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The arguments of composed attention, from what `_projected` returns."""
    before, of_keys_before, after, of_keys_after = (api.ComposeSide(factors=each) for each in tensors[3:])
    return *tensors[:3], api.ComposeWeights(before, of_keys_before), api.ComposeWeights(after, of_keys_after)


def _compare(layer: Any, rotary: Any, name: str, device: torch.device) -> tuple[str, dict[str, Any]]:
    """The chosen backend, and of each pass the error that comes nearest to the largest allowed, with that one."""
    dtype = getattr(torch, name)
    given = copy.deepcopy(layer).to(device, dtype)
    exact = copy.deepcopy(given).float()
    states = torch.randn(1, LENGTH, HIDDEN).to(device, dtype)
    positions = rotary.to(device)(states.float(), torch.arange(LENGTH, device=device)[None])  # in float32
    tensors = [each.detach().to(dtype) for each in _projected(exact, states.float(), positions)]
    found = {}
    for passed in ("forward", "backward", "decode"):
        if passed == "decode":
            states, positions = states[:, -1:], [each[:, -1:] for each in positions]
            tensors = [each[:, :, -1:] if number in (0, 3, 5) else each for number, each in enumerate(tensors)]
        trains = passed == "backward"
        expected = _results(exact, states.float(), positions, [each.float() for each in tensors], True, trains)
        errors = []
        for is_plain in (True, False):
            actual = _results(given, states, positions, tensors, is_plain, trains)
            distances = [(one.float() - other).norm() / other.norm() for one, other in zip(actual, expected)]
            errors.append([float(each.nan_to_num(math.inf)) for each in distances])
        most = [MOST_IN_FLOAT32 if dtype == torch.float32 else MOST_OF_PLAIN * error for error in errors[0]]
        found[passed] = max(zip(errors[1], most), key=lambda pair: pair[0] / pair[1])
    return api.explain_choice(*_together(tensors), sliding_window=layer.sliding_window)[-1][0], found


def _results(
    layer: Any, states: Tensor, positions: Any, tensors: Sequence[Tensor], is_plain: bool, trains: bool
) -> Sequence[Tensor]:
    """Compute what projection, and attention to `tensors`, return, or else the gradients of all that they are given."""
    options: Any = {"sliding_window": layer.sliding_window}
    if is_plain:  # as an eager layer, whose scores and weights are of the inputs' type where they are not composed yet
        rounded = lambda name, maps: maps if "composed" in name else maps.to(states.dtype).to(maps.dtype)  # noqa: E731
        options |= {"implementation": "plain", "observe": rounded}
    with torch.set_grad_enabled(trains):
        states, *tensors = (each.detach().requires_grad_(trains) for each in (states, *tensors))
        outputs = _projected(layer, states, positions, "dcmha_plain" if is_plain else "eager")
        outputs.append(api.composed_attention(*_together(tensors), **options))
        if not trains:
            return outputs
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(each.shape, generator=generator).bfloat16().to(each) for each in outputs]
    return torch.autograd.grad(outputs, [states, *tensors, *layer.parameters()], directions)
