"""Sizes of tiles and numbers of warps, which a GPU's tuned configuration may set."""

from typing import NamedTuple


class ForwardConfig(NamedTuple):
    """
    Sizes of tiles and numbers of warps.

    Args:
        block_rows (`int`, defaults to 64): Queries of a tile of the two matrix products, and of a block of the band.
        block_keys (`int`, defaults to 64): Keys of a tile.
        compose_rows (`int`, defaults to 32): Queries of a tile of the compositions; divides `block_rows`.
        product_warps, product_stages, compose_warps: Of the matrix products and of the compositions.
    """

    block_rows: int = 64
    block_keys: int = 64
    compose_rows: int = 32
    product_warps: int = 4
    product_stages: int = 2
    compose_warps: int = 4


class BackwardConfig(NamedTuple):
    """
    Sizes of tiles and numbers of warps of the backward pass.

    Args:
        block_rows (`int`, defaults to 64): Queries of a tile of the matrix products, and of a block of the band.
        block_keys (`int`, defaults to 64): Keys of a tile, 128 at most.
        compose_rows (`int`, defaults to 32): Queries of a tile of the compositions, a multiple of 16 that divides
            `block_rows`.
        product_warps, product_stages, compose_warps: Of the matrix products and of the compositions. A tile of the
            compositions keeps twelve maps in registers at rank 2, so more threads than forward share it.
    """

    block_rows: int = 64
    block_keys: int = 64
    compose_rows: int = 32
    product_warps: int = 4
    product_stages: int = 2
    compose_warps: int = 8


Config = ForwardConfig | BackwardConfig
