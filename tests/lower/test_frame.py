"""Frames are shared, pickled as data, and count calls afresh in each activation."""

import copy
import pickle

import torch

from autoprec.lower.casts import floats
from autoprec.lower.frame import Choice, frame_for
from autoprec.lower.gemm import GemmSettings
from autoprec.plan import Formats

BF16, FP32 = torch.bfloat16, torch.float32
LOW = Choice("gemm", Formats.all("bf16"))
HIGH = Choice("gemm", Formats.all("fp32"))


def dtype_of(frame, name, *args):
    action = frame.actions.get(name)
    return action(lambda *a, **k: next(floats(a)).dtype, args, {})


def test_equal_choices_are_one_frame():
    assert frame_for((("matmul", None, LOW),), GemmSettings()) is frame_for((("matmul", None, LOW),), GemmSettings())
    assert frame_for((("matmul", None, LOW),), GemmSettings()) is not frame_for(
        (("matmul", None, HIGH),), GemmSettings()
    )


def test_a_frame_survives_copies_as_itself():
    frame = frame_for((("matmul", None, LOW),), GemmSettings())
    assert copy.deepcopy(frame) is frame
    assert pickle.loads(pickle.dumps(frame)) is frame


def test_every_spelling_of_an_op_has_its_action():
    frame = frame_for((("matmul", None, LOW), ("mul", None, Choice("cast", Formats.all("fp32")))), GemmSettings())
    x = torch.ones(2, 2)
    for name in ("matmul", "__matmul__", "__rmatmul__", "linalg_matmul"):
        assert dtype_of(frame, name, x, x) == BF16, name
    for name in ("mul", "__mul__", "__rmul__", "multiply"):
        assert dtype_of(frame, name, x.bfloat16(), x) == FP32, name
    # in place the destination can't change its dtype
    assert dtype_of(frame, "mul_", x.bfloat16(), x) == BF16
    assert frame.actions.get("add") is None


def test_the_kth_call_counts_spellings_together_and_starts_afresh():
    frame = frame_for((("matmul", None, LOW), ("matmul", 1, HIGH)), GemmSettings())
    x = torch.ones(2, 2)
    for _ in range(2):
        activation = frame.enter()
        assert activation is not frame
        assert [dtype_of(activation, name, x, x) for name in ("matmul", "__matmul__", "matmul")] == [BF16, FP32, BF16]


def test_calls_without_a_floating_tensor_dont_count():
    frame = frame_for(
        (("sum", None, Choice("cast", Formats.all("fp32"))), ("sum", 0, Choice("widest"))), GemmSettings()
    )
    activation = frame.enter()
    whole, low = torch.ones(2, dtype=torch.long), torch.ones(2, dtype=BF16)
    activation.actions.get("sum")(torch.sum, (whole,), {})
    assert dtype_of(activation, "sum", low) == BF16  # call 0
    assert dtype_of(activation, "sum", low) == FP32
    double = frame.enter()
    double.actions.get("sum")(torch.sum, (low.double(),), {})  # a double is a floating tensor, though never cast
    assert dtype_of(double, "sum", low) == FP32
