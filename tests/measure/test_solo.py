"""A call made again alone does what the converted model does there: the same kernels, casts of weights, no others."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.errors import ConversionError
from autoprec.measure.replay import record_calls
from autoprec.measure.solo import solo_step
from autoprec.plan import Formats

CPU = torch.device("cpu")


class Ops(TorchDispatchMode):
    """Counts the kernels that run, and the dtypes of what they read."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self.shapes: dict[str, set[tuple[int, ...]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.counts[name] += 1
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        self.dtypes.setdefault(name, set()).update(t.dtype for t in tensors)
        if isinstance(out, torch.Tensor):
            self.shapes.setdefault(name, set()).add(tuple(out.shape))
        return out


def ops_of(module, *inputs, op, choice="bf16", mode="training", copies=1, **settings) -> Ops:
    """What a step of the module's call of an op runs, after a first step."""
    calls = [c for c in record_calls(module, lambda m: m(*inputs), mode) if c.site.op == op]
    formats = choice if isinstance(choice, Formats) else Formats.all(choice)
    given = {"low": "bf16", "recipe": {}, "device": CPU, **settings}
    step = solo_step(calls[0], formats, mode=mode, copies=copies, **given)
    step()
    with Ops() as ops:
        step()
    return ops


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def test_training_casts_the_weights_and_their_gradients_and_nothing_else():
    layer = nn.Linear(8, 6)
    ops = ops_of(layer, leaf(4, 8), op="linear")
    assert ops.counts["_to_copy"] == 4  # weight and bias, and back
    assert ops.counts["addmm"] == 1
    assert ops.counts["mm"] == 2
    assert ops.dtypes["addmm"] == ops.dtypes["mm"] == {torch.bfloat16}


def test_fp32_casts_nothing():
    ops = ops_of(nn.Linear(8, 6), leaf(4, 8), op="linear", choice="fp32")
    assert "_to_copy" not in ops.counts
    assert ops.dtypes["mm"] == {torch.float32}


def test_an_input_without_gradient_costs_no_product_for_it():
    assert ops_of(nn.Linear(8, 6), torch.randn(4, 8), op="linear").counts["mm"] == 1


def test_a_frozen_weight_costs_no_product_for_it():
    layer = nn.Linear(8, 6).requires_grad_(False)
    assert ops_of(layer, leaf(4, 8), op="linear").counts["mm"] == 1


def test_inference_keeps_cast_weights_and_has_no_backward():
    ops = ops_of(nn.Linear(8, 6), torch.randn(4, 8), op="linear", mode="inference")
    assert dict(ops.counts) == {"t": 1, "addmm": 1}


def test_copies_have_tensors_of_their_own():
    ops = ops_of(nn.Linear(8, 6), leaf(4, 8), op="linear", copies=3)
    assert (ops.counts["addmm"], ops.counts["mm"], ops.counts["_to_copy"]) == (3, 6, 12)
    assert "add" not in ops.counts  # gradients of a shared weight would be added up


def test_products_of_activations_cast_nothing():
    class Products(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q), q @ q.transpose(-1, -2)

    for op in ("scaled_dot_product_attention", "matmul"):
        ops = ops_of(Products(), leaf(1, 2, 5, 4), op=op)
        assert "_to_copy" not in ops.counts
        assert {d for dtypes in ops.dtypes.values() for d in dtypes} <= {torch.bfloat16, torch.float32}
    assert ops.dtypes["bmm"] == {torch.bfloat16}
    assert ops.counts["bmm"] == 3


def test_a_view_of_a_parameter_is_cast_as_in_the_model():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 8))

        def forward(self, x):
            return x @ self.table.T

    ops = ops_of(Tied(), leaf(4, 8), op="matmul")
    assert ops.counts["_to_copy"] == 2


def test_a_convolution_keeps_its_settings():
    layer = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, padding_mode="circular")
    ops = ops_of(layer, leaf(2, 4, 8, 8), op="conv2d")
    assert ops.shapes["convolution"] == {(2, 6, 4, 4)}
    assert ops.dtypes["convolution"] == {torch.bfloat16}
    assert ops.counts["convolution_backward"] == 1


def test_a_recurrent_layer_casts_all_its_weights():
    layer = nn.LSTM(6, 5, num_layers=2)
    ops = ops_of(layer, leaf(7, 3, 6), op="lstm")
    assert ops.counts["_to_copy"] >= 2 * len(list(layer.parameters()))


@pytest.mark.parametrize(
    ("module", "inputs", "op"),
    [
        (nn.LayerNorm(8), (leaf(4, 8),), "layer_norm"),
        (nn.BatchNorm1d(8), (leaf(4, 8),), "batch_norm"),
        (nn.GELU(), (leaf(4, 8),), "gelu"),
        (nn.Softmax(-1), (leaf(4, 8),), "softmax"),
        (nn.Dropout(0.5), (leaf(4, 8),), "dropout"),
        (nn.Embedding(5, 8), (torch.tensor([1, 4]),), "embedding"),
        (nn.MultiheadAttention(8, 2), (leaf(3, 2, 8),) * 3, "multi_head_attention_forward"),
        (nn.MaxPool2d(2), (leaf(1, 2, 4, 4),), "max_pool2d"),
    ],
)
@pytest.mark.parametrize("choice", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_any_op_runs_alone(module, inputs, op, choice, mode):
    ops = ops_of(module, *inputs, op=op, choice=choice, mode=mode)
    assert ops.counts
    backward = [name for name in ops.counts if "backward" in name]
    assert not backward or mode == "training"


def test_shares_stay_shares():
    share = torch.full((3,), 0.5, requires_grad=True)
    ops = ops_of(nn.BCELoss(), share, torch.ones(3), op="binary_cross_entropy", choice="fp32")
    assert ops.counts["binary_cross_entropy_backward"] == 1


def test_batch_norm_reads_16_bit_and_keeps_its_statistics():
    ops = ops_of(nn.BatchNorm1d(8), leaf(4, 8), op="batch_norm")
    assert "_to_copy" not in ops.counts
    assert ops.dtypes["native_batch_norm"] == {torch.bfloat16, torch.float32}


def test_eight_bits_run_in_a_backend_of_the_layer():
    formats = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
    ops = ops_of(nn.Linear(64, 64), leaf(64, 64), op="linear", choice=formats)
    plain = ops_of(nn.Linear(64, 64), leaf(64, 64), op="linear")
    assert ops.counts.total() > 2 * plain.counts.total()


def test_a_format_that_the_site_does_not_get_is_refused():
    class Product(nn.Module):
        def forward(self, x):
            return x @ x

    with pytest.raises(ConversionError, match="only linear layers"):
        ops_of(Product(), leaf(4, 4), op="matmul", choice="fp8_e4m3")
