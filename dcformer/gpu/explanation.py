"""What is chosen for a call of composed attention on a device, and why: for people, before they run anything long."""

from pathlib import Path

import torch
from torch import Tensor

from .. import ops
from ..dcmha import Implementation, candidates, implementations
from ..dcmha_factors import ComposeSide, ComposeWeights
from ..dcmha_mask import Visibility
from .automatic import machine, verdicts
from .cases import case_of
from .triton_form import why_not_triton
from .verdicts import describe, describe_verdict


def explain_lines(
    heads: int,
    key_value_heads: int,
    channels: int,
    queries: int,
    keys: int,
    window: int | None,
    dtype: torch.dtype,
    device: str | torch.device,
    needs_gradient: bool,
) -> list[str]:
    """
    What composed attention chooses for one row of a batch, with the compositions that models have by default.

    On a GPU this finds out the verdict on the Triton form if there is none yet.

    Args:
        heads, key_value_heads, channels, queries, keys (`int`): Sizes.
        window (`int`, *optional*): Of sliding attention. None: every key up to the query's own is seen.
        dtype (`torch.dtype`): Of query, key and value.
        device (`str` or `torch.device`): Where.
        needs_gradient (`bool`): Whether it is for training.

    Returns:
        `list[str]`: lines to print: the call, what is chosen, every form in the order in which it is tried with its
        reason or purpose, what the verdict says, and the sizes of tiles.

    Raises:
        ValueError: if the sizes do not fit together.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    arguments = _arguments(heads, key_value_heads, channels, queries, keys, dtype, device, needs_gradient)
    mask = Visibility(queries, keys, sliding_window=window)
    reasons = {form.name: _why_not(form, arguments, mask) for form in candidates(device.type)}
    chosen = next(name for name, reason in reasons.items() if reason is None)
    lines = [
        f"{queries} queries and {keys} keys, {heads} heads of {channels} channels ({key_value_heads} of keys and "
        f"values), {'all keys' if window is None else f'a window of {window}'}, "
        f"{str(dtype).removeprefix('torch.')}, {'training' if needs_gradient else 'no gradients'}, on {_name(device)}",
        f"chosen: {chosen}",
    ]
    table = implementations()
    others = [name for name in table if name not in reasons]
    for name in (*reasons, *others):
        purpose = table[name].purpose
        if name in others:
            reason = table[name].supports(*arguments, mask=mask, dropout=0.0)
            lines.append(f"  {name}: only by its name; {reason or purpose}")
        elif reasons[name] is not None:
            lines.append(f"  {name}: not chosen, {reasons[name]}")
        else:
            lines.append(f"  {name}: {'chosen' if name == chosen else 'would come next'}, {purpose}")
    return lines + _verdict_lines(arguments, mask, device) + _configuration_lines(heads, channels, device)


def _arguments(
    heads: int,
    key_value_heads: int,
    channels: int,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    device: torch.device,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, ComposeWeights, ComposeWeights]:
    """Operands that take no memory: a choice looks at everything but the values."""
    if key_value_heads < 1 or heads % key_value_heads != 0:
        raise ValueError(f"key_value_heads must divide the {heads} heads, got {key_value_heads}.")
    if min(queries, keys) < 1:
        raise ValueError(f"There must be at least one query and one key, got {queries} and {keys}.")

    def operand(*shape: int) -> Tensor:
        return torch.zeros((), dtype=dtype, device=device).requires_grad_(needs_gradient).expand(shape)

    def stage() -> ComposeWeights:
        # Rank 2 with a gate, of both sides.
        sides = (ComposeSide(factors=operand(1, heads, length, 5)) for length in (queries, keys))
        return ComposeWeights(*sides)

    states = (operand(1, key_value_heads, keys, channels) for _ in range(2))
    return operand(1, heads, queries, channels), *states, stage(), stage()  # type: ignore[return-value]


def _why_not(form: Implementation, arguments: tuple, mask: Visibility) -> str | None:
    return (form.why_not_automatic or form.supports)(*arguments, mask=mask, dropout=0.0)


def _verdict_lines(arguments: tuple, mask: Visibility, device: torch.device) -> list[str]:
    if device.type != "cuda":
        return []
    if why_not_triton(*arguments, mask=mask) is not None:
        return []
    case = case_of(*arguments, mask)
    verdict = verdicts.known(machine(device.index), case)
    if verdict is None:
        return []
    result = "may be chosen" if verdict.problem is None else f"is not chosen, {verdict.problem}"
    found_on = machine(device.index)
    return [
        f"verdict on the Triton form for {describe(case)}: it {result}",
        *(f"  {line}" for line in describe_verdict(case, verdict)),
        f"  found out with driver {found_on.driver}, Triton {found_on.triton}, torch {found_on.torch}, dcformer "
        f"{found_on.dcformer}",
    ]


def _configuration_lines(heads: int, channels: int, device: torch.device) -> list[str]:
    """The sizes of tiles that `dcformer bench tune` has found for this device."""
    if device.type != "cuda":
        return []
    from ..ops.tuning import load_configurations, tuned_config, user_file

    name = torch.cuda.get_device_name(device)
    packaged_file = Path(ops.__path__[0]) / "tuned_configurations.json"
    entries = [entry for path in (packaged_file, user_file()) for entry in load_configurations(path).get(name, [])]
    if not entries:
        return [f"tile sizes: the defaults, since none were tuned for {name} (`dcformer bench tune`)"]
    lines = ["tile sizes, of the tuned shape that is nearest:"]
    for kernel in sorted({str(entry["kernel"]) for entry in entries}):
        sizes = tuned_config(kernel, heads, channels, name)
        lines.append(f"  {kernel}: " + ", ".join(f"{key} {value}" for key, value in sizes.items()))
    return lines


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
