"""Which inputs of a model begin with the same tokens: a tree whose nodes are stretches of tokens to compute once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np


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


@dataclass
class _Node:
    """Inputs that have their first `depth` tokens in common: those that end there, and what differs after it."""

    depth: int
    first: int
    places: list[int]
    # Depths above at which what is shared may end: 0, and those of nodes above, in ascending order.
    starts: np.ndarray
    children: list[_Node] = field(default_factory=list)
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


def all_stretches(roots: Sequence[Stretch]) -> Iterator[Stretch]:
    """The stretches of a tree, each before what follows it."""
    left = list(roots)
    while left:
        stretch = left.pop()
        left.extend(stretch.children)
        yield stretch


def _nodes(inputs: Sequence[Sequence[int]]) -> list[_Node]:
    """Every place where inputs part or end, the one above before those below."""
    ordered = sorted(range(len(inputs)), key=lambda place: inputs[place])
    nodes: list[_Node] = []
    left: list[tuple[int, int, np.ndarray, list[_Node]]] = [(0, len(ordered), np.zeros(1, dtype=np.int64), [])]
    while left:
        low, high, starts, siblings = left.pop()
        # Of what is sorted, the first and the last have least in common.
        depth = shared_length(inputs[ordered[low]], inputs[ordered[high - 1]])
        ending = low
        while ending < high and len(inputs[ordered[ending]]) == depth:
            ending += 1
        node = _Node(depth, min(ordered[low:high]), ordered[low:ending], starts)
        nodes.append(node)
        siblings.append(node)
        starts = np.append(starts, depth)  # one array for all children
        while ending < high:
            token, low = inputs[ordered[ending]][depth], ending
            while ending < high and inputs[ordered[ending]][depth] == token:
                ending += 1
            left.append((low, ending, starts, node.children))
    return nodes


def _weigh(node: _Node, least: int, most_shared: int) -> None:
    """Find the fewest tokens below the parent's end of a stretch, whichever it is, and whether one ends at the node."""
    own = node.depth - node.starts  # (starts,)
    if not node.children:
        node.tokens = np.repeat(own[:, None], most_shared + 1, axis=1)  # (starts, shared stretches allowed)
        return
    below = np.sum([child.tokens for child in node.children], axis=0)  # (starts and the node's own depth, allowed)
    for child in node.children:
        child.tokens = None
    tokens = below[:-1] + own[:, None] if node.places else below[:-1]
    ending = own[:, None] + below[-1, :-1]  # (starts, allowed but one)
    node.ends = np.zeros(tokens.shape, dtype=bool)
    node.ends[:, 1:] = (ending < tokens[:, 1:]) & (own >= least)[:, None]
    tokens[:, 1:] = np.where(node.ends[:, 1:], ending, tokens[:, 1:])
    node.tokens = tokens


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
