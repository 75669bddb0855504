"""The Triton kernels on a CUDA device, at the sizes and with the tiles that users get.

    TRITON_INTERPRET=0 python -m pytest -m gpu

The whole suite otherwise runs without a GPU, and these are left out of it.
"""

import oracles
import pytest
import torch

pytestmark = pytest.mark.gpu
TERMS = {"softcap", "alibi_slopes", "logit_bias", "sinks"}


@pytest.mark.parametrize("terms", [set(), TERMS], ids=["plain", "every_term"])
@pytest.mark.parametrize("mask", oracles.MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 40), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
def test_kernels_are_as_exact_as_plain_pytorch(function, dtype, dims, mask, terms):
    generator = torch.Generator().manual_seed(0)
    # Neither length is a multiple of a tile; grouped heads; more keys than queries.
    problem = oracles.make(
        function, dtype, 2, 2, 2, 300, 333, *dims, mask, terms, "full", generator
    )
    oracles.check(problem, "triton", device="cuda")
