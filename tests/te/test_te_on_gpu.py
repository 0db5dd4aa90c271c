"""Transformer Engine's real kernels against emulation: equal operands, so that accumulation alone differs."""

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends import LinearSpec, choose, get_backend
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
