"""Which inputs of a model begin with the same tokens: a tree whose nodes are stretches of tokens to compute once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


# A shorter beginning saves less than handing its keys and values on costs.
LEAST_SHARED = 8
# Stretches one after the other in an input. The keys and values of as many batches are held at once.
MOST_LEVELS = 3


@dataclass
class Stretch:
    """
    Tokens that all inputs below have in the same places, after the same tokens.

    Attributes:
        start: Position of the first of its tokens.
        stop: Position after the last one.
        places: Inputs that end with it.
        first: The first input that holds it.
        children: What follows it, beginning with different tokens or after too few common ones.
    """

    start: int
    stop: int
    first: int
    places: list[int]
    children: list[Stretch] = field(default_factory=list)


def shared_stretches(
    inputs: Sequence[Sequence[int]], least: int = LEAST_SHARED, most_levels: int = MOST_LEVELS
) -> list[Stretch]:
    """
    Part inputs into stretches, so that what several begin with is there once.

    Args:
        inputs: Token ids of every input.
        least: Fewest tokens of a stretch that others follow.
        most_levels: Most stretches of an input, those that others follow and the last one.

    Returns:
        The stretches that begin inputs. Those without children are whole inputs, which share nothing.
    """
    ordered = sorted(range(len(inputs)), key=lambda place: inputs[place])
    roots: list[Stretch] = []
    # Ranges of `ordered` that differ from the token after `start` on at the latest, and where their stretches go.
    left = [(0, len(ordered), 0, 1, roots)] if ordered else []
    while left:
        low, high, start, level, siblings = left.pop()
        first = min(ordered[low:high])
        # Of what is sorted, the first and the last have least in common.
        stop = shared_length(inputs[ordered[low]], inputs[ordered[high - 1]])
        ending = low
        while ending < high and len(inputs[ordered[ending]]) == stop:
            ending += 1
        places = ordered[low:ending]
        if ending == high:
            siblings.append(Stretch(start, stop, first, places))
            continue
        if stop - start >= least and level < most_levels:
            stretch = Stretch(start, stop, first, places)
            siblings.append(stretch)
            siblings, following, level = stretch.children, stop, level + 1
        else:
            following = start
            if places:
                siblings.append(Stretch(start, stop, min(places), places))
        while ending < high:
            token, low = inputs[ordered[ending]][stop], ending
            while ending < high and inputs[ordered[ending]][stop] == token:
                ending += 1
            left.append((low, ending, following, level, siblings))
    return roots


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
