"""The arguments of composed attention as the operators of `dcformer.ops` take them; nothing is copied."""

from ..dcmha_factors import ComposeWeights
from ..dcmha_mask import Visibility
from ..ops.arguments import Composition, Mask


def to_composition(weights: ComposeWeights | None) -> Composition | None:
    """One composition; None for one that changes nothing."""
    if weights is None or (weights.query is None and weights.key is None and weights.static is None):
        return None
    query, key = (None if side is None else side.factors for side in (weights.query, weights.key))
    return Composition(query, key, weights.static, weights.groups)


def to_mask(visibility: Visibility) -> Mask:
    """
    A mask.

    Raises:
        ValueError: if it has a gradient or differs between heads.
    """
    if (reason := why_no_mask(visibility)) is not None:
        raise ValueError(f"This mask is not for the operators of dcformer.ops: {reason}.")
    return Mask(
        visibility.is_causal,
        visibility.sliding_window,
        visibility.query_offset,
        visibility.padding,
        visibility.sequence_ids,
        visibility.dense,
    )


def why_no_mask(visibility: Visibility) -> str | None:
    """Why a mask cannot be one of the operators', as the end of a sentence; None if it can."""
    if visibility.requires_grad:
        return "the mask has a gradient"
    if not visibility.same_for_all_heads:
        return "the mask differs between heads"
    return None
