"""Sizes of tiles and numbers of warps, which a GPU's tuned configuration may set."""

import functools
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .tuning import tuned_config


class TileConfig(NamedTuple):
    """
    Of the forward and the backward pass.

    Args:
        block_rows (`int`, defaults to 64): Queries of a tile of the matrix products, and of a block of the band.
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


FORWARD = TileConfig()
# A tile of the compositions keeps twelve maps in registers at rank 2, so more threads than forward share it.
BACKWARD = TileConfig(compose_warps=8)

_Config = TypeVar("_Config", bound=tuple[Any, ...])


def for_type(config: TileConfig, dtype: torch.dtype) -> TileConfig:
    """Products of float32 do not use tensor cores: their tiles need the registers of twice as many warps."""
    return config._replace(product_warps=8) if dtype == torch.float32 else config


def tuned(default: _Config, kernel: str, query: Tensor) -> _Config:
    """`default` with what was tuned for this kernel on the query's device, at its shape or the nearest."""
    if not query.is_cuda:
        return default
    found = tuned_config(kernel, query.shape[1], query.shape[3], _device_name(query.device.index))
    return default._replace(**{name: found[name] for name in default._fields if name in found})


@functools.cache
def _device_name(index: int | None) -> str:
    return torch.cuda.get_device_name(index)
