"""Transformer Engine's real kernels against emulation: equal operands, so that accumulation alone differs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.backends import LinearSpec, choose, get_backend
from autoprec.backends.base import FirstHalf, Norm
from autoprec.plan import Formats
from autoprec.recipes import Block128Recipe, CurrentRecipe, DelayedRecipe, MXFP8Recipe, NVFP4Recipe, Recipe

pytestmark = pytest.mark.gpu

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
E4M3, MXFP8, NVFP4 = Formats.all("fp8_e4m3"), Formats.all("mxfp8"), Formats.all("nvfp4")
ROWS, OUT, IN = 33, 192, 320
CASES: list[tuple[Recipe, Formats]] = [
    (CurrentRecipe(), HYBRID),
    (CurrentRecipe(power_of_two=True, fast_output=False), E4M3),
    (CurrentRecipe(backward="high_precision"), HYBRID),
    (CurrentRecipe(backward="dequantized"), HYBRID),
    (DelayedRecipe(history_length=3), HYBRID),
    (DelayedRecipe(algorithm="most_recent", margin=1), E4M3),
    (Block128Recipe(), E4M3),
    (Block128Recipe(power_of_two=False), HYBRID),
    (MXFP8Recipe(), MXFP8),
    (NVFP4Recipe(stochastic_rounding=False), NVFP4),
]


def steps(name: str, spec: LinearSpec) -> list[Tensor]:
    """Outputs and gradients of training steps whose numbers grow and shrink."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(OUT, IN, generator=generator).cuda())
    trace = []
    for size in (1.0, 16.0, 0.25, 2.0):
        x = (torch.randn(ROWS, IN, generator=generator) * size).cuda().bfloat16().requires_grad_()
        weight.grad = None
        output = get_backend(name).linear(x, weight, None, spec)
        output.backward(torch.randn(ROWS, OUT, generator=generator).cuda().bfloat16() / size)
        assert x.grad is not None
        assert weight.grad is not None
        trace += [output.detach(), x.grad, weight.grad]
    return trace


@pytest.mark.parametrize(("recipe", "formats"), CASES, ids=str)
def test_kernels_multiply_the_operands_of_emulation(recipe: Recipe, formats: Formats) -> None:
    x, weight = torch.empty(ROWS, IN, dtype=torch.bfloat16, device="cuda"), torch.empty(OUT, IN, device="cuda")
    backend, reason = choose("linear", formats, x, weight, ("transformer_engine",), "training", recipe=recipe)
    if backend is None:
        pytest.skip(reason)
    spec = LinearSpec(formats=formats, recipe=recipe)
    for got, wanted in zip(steps("transformer_engine", spec), steps("emulated", spec), strict=True):
        # One rounding to bf16, and tensor cores that accumulate in fewer bits than fp32.
        assert (got - wanted).float().norm() <= 2.0**-7 * wanted.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_fused_kernels_give_what_their_parts_do(kind: Any, dtype: torch.dtype) -> None:
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (ROWS, IN), "scale": (IN,), "first": (OUT, IN), "second": (64, OUT), "bias": (OUT,)}
    drawn = {name: torch.randn(shape, generator=generator).cuda() for name, shape in shapes.items()}
    operands = drawn["x"], drawn["first"]
    backend, reason = choose("linear", HYBRID, *operands, ("transformer_engine",), "training", recipe=spec.recipe)
    if backend is None:
        pytest.skip(reason)
    results = []
    for fused in (True, False):
        t = {name: value.clone().requires_grad_() for name, value in drawn.items()}
        x = t["x"].to(dtype)
        norm = Norm(kind=kind, eps=1e-5, weight=t["scale"], bias=None)
        normed = F.rms_norm if kind == "RMSNorm" else F.layer_norm
        if fused and dtype == torch.bfloat16:
            half = FirstHalf(norm=norm, weight=t["first"], bias=t["bias"], activation="relu")
            output = backend.mlp(x, half, t["second"], None, spec)
        else:
            if fused:
                hidden = backend.norm_linear(x, norm, t["first"], t["bias"], spec)
            else:
                hidden = backend.linear(normed(x, (IN,), t["scale"].to(dtype), eps=1e-5), t["first"], t["bias"], spec)
            output = backend.linear(torch.relu(hidden), t["second"], None, spec)
        output.square().mean().backward()
        results.append([output.detach(), *(v.grad for v in t.values())])
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).norm() <= 0.05 * wanted.norm()
