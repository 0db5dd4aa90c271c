"""Which calls are an activation that a fused kernel has, and what a deferred result answers without being computed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from autoprec.backends.base import Norm
from autoprec.errors import ConversionError
from autoprec.lower.deferred import Deferred, Pending, activation_of


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "found"),
    [
        ("gelu", (), {"approximate": "tanh"}, "gelu_tanh"),
        ("gelu", (), {}, None),  # exact, where Transformer Engine's is the approximation
        ("gelu", (), {"approximate": "none"}, None),
        ("relu", (), {}, "relu"),
        ("relu", (False,), {}, "relu"),
        ("relu", (True,), {}, None),
        ("silu", (), {"inplace": False}, "silu"),
        ("silu", (), {"inplace": True}, None),
        ("tanh", (), {}, None),
        ("cat", (torch.ones(2),), {}, None),
    ],
)
def test_activations(name: str, args: Any, kwargs: Any, found: str | None) -> None:
    assert activation_of(name, args, kwargs) == found


def deferred() -> tuple[Deferred, list[int]]:
    """A result of ones, and how often it was computed."""
    computed: list[int] = []

    def compute() -> Tensor:
        computed.append(1)
        return torch.ones(2, 3)

    source = torch.zeros(2, 3)
    norm = Norm(kind="LayerNorm", eps=1e-5, weight=torch.ones(3))
    return Deferred(Pending(source, norm, compute, mlp=False), torch.float32), computed


def test_a_result_is_computed_by_the_first_call_that_reads_it_and_once() -> None:
    result, computed = deferred()
    assert (result.shape, result.dtype, result.dim(), result.numel()) == ((2, 3), torch.float32, 2, 6)
    assert not computed
    assert torch.equal(result + 1, torch.full((2, 3), 2.0))
    assert torch.equal(torch.cat([result, result]), torch.ones(4, 3))
    assert result.tolist() == torch.ones(2, 3).tolist()
    assert "1." in repr(result)
    assert computed == [1]


def test_a_read_from_below_is_an_error() -> None:
    result, _ = deferred()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(ConversionError, match="below torch's functions"):
        torch.add(result, 1)
