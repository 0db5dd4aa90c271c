"""What one call's arguments become, and what is never cast."""

import collections

import pytest
import torch
from torch.nn import functional as F

from autoprec.lower.casts import (
    CastAround,
    CastTo,
    CastToDestination,
    CastToWidest,
    KeepRange,
    WideFactory,
    cast,
    floats,
)

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def dtypes(*args, **kwargs):
    """The dtypes a function was called with."""
    return [t.dtype for t in floats((*args, *kwargs.values()))]


def test_cast_reaches_into_lists_and_tuples():
    x = torch.ones(2)
    pair = collections.namedtuple("Pair", "a b")(x, 1)
    out = cast([x, (x, 3, None), pair], BF16)
    assert [t.dtype for t in floats(out)] == [BF16, BF16, BF16]
    assert out[1][1:] == (3, None)
    assert type(out[2]) is type(pair)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, FP64, torch.complex64])
def test_cast_leaves_other_dtypes(dtype):
    x = torch.zeros(2, dtype=dtype)
    assert cast(x, BF16) is x


def test_cast_copies_nothing_that_has_the_dtype():
    x = torch.ones(2)
    assert cast(x, FP32) is x


def test_cast_to_reaches_keywords_but_not_a_call_that_writes():
    x, out = torch.ones(2), torch.zeros(2)
    assert CastTo(BF16)(dtypes, (x,), {"other": x}) == [BF16, BF16]
    assert CastTo(BF16)(dtypes, (x,), {"out": None}) == [BF16]
    assert CastTo(BF16)(torch.exp, (x,), {"out": out}) is out
    assert torch.equal(out, x.exp())


@pytest.mark.parametrize(
    ("call", "order"),
    [
        (lambda f, x, m, v, w, b: f(F.batch_norm, (x, m, v, w, b, True, 0.5), {}), "F"),
        (
            lambda f, x, m, v, w, b: f(F.batch_norm, (x,), {"running_mean": m, "running_var": v, "training": True}),
            "keywords",
        ),
        (lambda f, x, m, v, w, b: f(torch.batch_norm, (x, w, b, m, v, True, 0.5, 1e-5, False), {}), "torch"),
    ],
)
def test_running_statistics_are_written_through_the_cast(call, order):
    x = torch.randn(16, 3) + 2
    mean, var = torch.zeros(3, dtype=BF16), torch.ones(3, dtype=BF16)
    weight, bias = torch.ones(3, dtype=BF16, requires_grad=True), torch.zeros(3, dtype=BF16, requires_grad=True)
    call(CastAround(FP32), x, mean, var, weight, bias)
    assert (mean > 0.1).all(), order
    assert not torch.equal(var, torch.ones_like(var))
    assert torch.equal(weight, torch.ones_like(weight))


def test_destination_sets_the_dtype():
    cache, new = torch.zeros(4, 2), torch.ones(2, 2, dtype=BF16)
    CastToDestination()(torch.Tensor.index_copy_, (cache, 0, torch.tensor([1, 3]), new), {})
    assert cache.dtype == FP32
    assert cache.sum() == 4
    low = torch.zeros(2, dtype=BF16)
    assert CastToDestination()(dtypes, (low, torch.ones(2)), {}) == [BF16, BF16]


def test_widest_changes_only_what_differs():
    a, b = torch.ones(2, dtype=BF16), torch.ones(2)
    assert CastToWidest()(dtypes, (a, a), {}) == [BF16, BF16]
    assert CastToWidest()(dtypes, (a, b), {}) == [FP32, FP32]
    assert CastToWidest()(dtypes, (a, a.half()), {}) == [FP32, FP32]


@pytest.mark.parametrize(
    ("number", "dtype", "want"),
    [(-1e9, FP16, FP32), (-1e4, FP16, FP16), (65504.0, FP16, FP16), (-1e9, BF16, BF16),
     (torch.finfo(FP32).min, BF16, FP32), (float("-inf"), FP16, FP16), (1e30, FP32, FP32)],
)  # fmt: skip
def test_a_number_beyond_the_range_widens_the_call(number, dtype, want):
    x = torch.zeros(2, dtype=dtype)
    out = KeepRange()(torch.masked_fill, (x, torch.tensor([True, False]), number), {})
    assert out.dtype == want
    assert out[0] == torch.tensor(number, dtype=want)


def test_in_place_the_number_is_brought_into_range():
    x = torch.zeros(2, dtype=FP16)
    out = KeepRange(inplace=True)(torch.Tensor.masked_fill_, (x, torch.tensor([True, False]), -1e9), {})
    assert out is x
    assert x[0] == torch.finfo(FP16).min


def test_factories_stay_fp32():
    assert WideFactory()(torch.arange, (300,), {"dtype": BF16}).dtype == FP32
    assert WideFactory()(torch.arange, (300,), {}).dtype == torch.int64
    assert WideFactory()(torch.arange, (300,), {"dtype": torch.int32}).dtype == torch.int32
