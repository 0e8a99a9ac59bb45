"""What Triton's interpreter does otherwise than a GPU, on which the choice of types in these tests rests."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _product_kernel(LEFT, RIGHT, PRODUCT, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(LEFT + places), tl.load(RIGHT + places), input_precision="ieee")
    tl.store(PRODUCT + places, product)


def relative_error(dtype: torch.dtype) -> float:
    left, right = torch.randn(2, 16, 16).to(dtype)
    product = torch.empty(16, 16)
    _product_kernel[(1,)](left, right, product, SIZE=16)
    exact = left.double() @ right.double()
    return float((product - exact).abs().max() / exact.abs().max())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which needs no interpreter")
def test_products_are_right_but_for_bfloat16():
    assert relative_error(torch.float32) < 1e-6
    assert relative_error(torch.float16) < 1e-6
    # Once this is right too, the tests of the kernels may take bfloat16.
    assert relative_error(torch.bfloat16) > 0.1
