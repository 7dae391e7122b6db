"""A sum over many inputs has one order, whatever stands beside it."""

from __future__ import annotations

import pytest
import torch

from zerogap.numerics.certify import certify
from zerogap.numerics.matmul import linear, pack
from zerogap.numerics.shape import AttentionShape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_inputs", [4864, 4860])
def test_a_down_projection_of_4864_inputs_has_the_same_bits_served_and_trained(dtype, num_inputs):
    """A11: 38 blocks of 128; few rows and many, dense and prepacked, add them in one order."""
    num_outputs = 96
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(33, num_inputs, generator=generator).to(dtype)
    weight_NK = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    certificate = certify(((num_inputs, num_outputs),), AttentionShape(4, 2, 32), 64, dtype)
    assert not certificate.failures
    route = certificate.routes.linear(num_inputs, num_outputs)
    packed = pack(weight_NK, route)
    with torch.no_grad():
        trained = linear(x_MK, weight_NK, None, route)
        for count in (1, 2, 3, 8, 33):
            assert torch.equal(linear(x_MK[:count], weight_NK, None, route, packed), trained[:count])
    with_grad = linear(x_MK.requires_grad_(), weight_NK, None, route)
    assert torch.equal(with_grad, trained)
