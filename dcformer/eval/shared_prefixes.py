"""Which inputs of a model begin with the same tokens: a tree whose nodes are stretches of tokens to compute once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


# A shorter beginning saves less than handing its keys and values on costs.
LEAST_SHARED = 8
# Stretches one after the other in an input. The keys and values of as many batches are held at once.
MOST_LEVELS = 3
# Where an input parts from others at more places than so many, the highest are left out of what may be shared.
_MOST_STARTS = 64
_NEVER = 2**60


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


@dataclass
class _Node:
    """Inputs that have their first `depth` tokens in common: those that end there, and what differs after it."""

    depth: int
    first: int
    places: list[int]
    parent: _Node | None
    children: list[_Node] = field(default_factory=list)
    # Depths above at which what is shared may end: 0, and those of nodes above, in ascending order.
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    # For each of `starts`, and each number of shared stretches that may follow it: tokens to compute from there on,
    # and whether a shared stretch ends here.
    tokens: np.ndarray | None = None
    ends: np.ndarray | None = None


def shared_stretches(
    inputs: Sequence[Sequence[int]], least: int = LEAST_SHARED, most_levels: int = MOST_LEVELS
) -> list[Stretch]:
    """
    Part inputs into stretches, so that what several begin with is there once, with the fewest tokens in all.

    Args:
        inputs: Token ids of every input.
        least: Fewest tokens of a stretch that others follow.
        most_levels: Most stretches of an input, those that others follow and the last one.

    Returns:
        The stretches that begin inputs. Those without children are whole inputs, which share nothing.
    """
    if not inputs:
        return []
    nodes = _nodes(inputs)
    for node in reversed(nodes):  # children before parents
        _weigh(node, least, most_levels - 1)
    roots: list[Stretch] = []
    left = [(nodes[0], 0, most_levels - 1, roots)]
    while left:
        node, start, allowed, siblings = left.pop()
        if node.ends is not None and node.ends[np.searchsorted(node.starts, start), allowed]:
            stretch = Stretch(start, node.depth, node.first, node.places)
            siblings.append(stretch)
            start, allowed, siblings = node.depth, allowed - 1, stretch.children
        elif node.places:
            siblings.append(Stretch(start, node.depth, min(node.places), node.places))
        left.extend((child, start, allowed, siblings) for child in node.children)
    return roots


def _nodes(inputs: Sequence[Sequence[int]]) -> list[_Node]:
    """Every place where inputs part or end, the one above before those below."""
    ordered = sorted(range(len(inputs)), key=lambda place: inputs[place])
    nodes: list[_Node] = []
    left: list[tuple[int, int, _Node | None]] = [(0, len(ordered), None)]
    while left:
        low, high, parent = left.pop()
        # Of what is sorted, the first and the last have least in common.
        depth = shared_length(inputs[ordered[low]], inputs[ordered[high - 1]])
        ending = low
        while ending < high and len(inputs[ordered[ending]]) == depth:
            ending += 1
        node = _Node(depth, min(ordered[low:high]), ordered[low:ending], parent)
        nodes.append(node)
        if parent is not None:
            parent.children.append(node)
            above = parent.starts if len(parent.starts) < _MOST_STARTS else np.delete(parent.starts, 1)
            node.starts = np.append(above, parent.depth) if parent.depth > 0 else above
        while ending < high:
            token, low = inputs[ordered[ending]][depth], ending
            while ending < high and inputs[ordered[ending]][depth] == token:
                ending += 1
            left.append((low, ending, node))
    return nodes


def _weigh(node: _Node, least: int, most_shared: int) -> None:
    """Find the fewest tokens below the parent's end of a stretch, whichever it is, and whether one ends at the node."""
    own = node.depth - node.starts  # (starts,)
    if not node.children:
        node.tokens = np.repeat(own[:, None], most_shared + 1, axis=1)  # (starts, shared stretches allowed)
        return
    below = np.sum([child.tokens for child in node.children], axis=0)  # (starts of the children, allowed)
    starts = node.children[0].starts
    for child in node.children:
        child.tokens = None
    without = np.full((len(own), most_shared + 1), _NEVER)
    is_kept = np.isin(node.starts, starts)
    without[is_kept] = below[np.searchsorted(starts, node.starts[is_kept])]
    if node.places:
        without += own[:, None]
    ending = np.full_like(without, _NEVER)
    if most_shared > 0:
        ending[:, 1:] = own[:, None] + below[-1, :-1]
        ending[own < least] = _NEVER
    node.ends = ending < without
    node.tokens = np.minimum(ending, without)


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
