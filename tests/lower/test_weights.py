"""Kept weight casts follow their weight, and go with it."""

import gc
import weakref

import pytest
import torch
from torch import nn

from autoprec.lower.weights import cast_weight, forget, kept_bytes

BF16 = torch.bfloat16


@pytest.fixture
def weight():
    return nn.Parameter(torch.randn(4, 4))


def test_the_cast_is_kept_without_gradients_only(weight):
    with torch.no_grad():
        low = cast_weight(weight, BF16)
        assert cast_weight(weight, BF16) is low
        assert kept_bytes([weight]) == 32
    assert cast_weight(weight, BF16).requires_grad


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.copy_(torch.ones(4, 4)),
        lambda w: setattr(w, "data", torch.ones(4, 4)),
        lambda w: nn.init.zeros_(w),
        lambda w: torch.optim.SGD([w], lr=1.0).step() if setattr(w, "grad", torch.ones(4, 4)) is None else None,
    ],
)
def test_a_written_weight_is_cast_again(weight, write):
    with torch.no_grad():
        cast_weight(weight, BF16)
        write(weight)
        assert torch.equal(cast_weight(weight, BF16), weight.to(BF16))


def test_another_dtype_is_cast_again(weight):
    with torch.no_grad():
        cast_weight(weight, BF16)
        assert cast_weight(weight, torch.float16).dtype == torch.float16
        assert cast_weight(weight, BF16).dtype == BF16
        assert cast_weight(weight, torch.float32) is weight


def test_a_cast_goes_with_its_weight(weight):
    with torch.no_grad():
        gone = weakref.ref(cast_weight(weight, BF16))
    assert gone() is not None
    forget([weight])
    gc.collect()
    assert gone() is None


def test_a_dead_weight_keeps_no_cast():
    weight = nn.Parameter(torch.randn(4, 4))
    with torch.no_grad():
        gone = weakref.ref(cast_weight(weight, BF16))
    del weight
    gc.collect()
    assert gone() is None


def test_weights_made_in_inference_mode_have_no_version():
    with torch.inference_mode():
        weight = nn.Parameter(torch.ones(2))
        assert torch.equal(cast_weight(weight, BF16), torch.ones(2, dtype=BF16))
        weight.mul_(2)
        assert torch.equal(cast_weight(weight, BF16), torch.full((2,), 2.0, dtype=BF16))


def test_buffers_and_activations_arent_kept():
    with torch.no_grad():
        x = torch.randn(2)
        assert cast_weight(x, BF16) is not cast_weight(x, BF16)
