"""Block operands of the native backend: the numbers of the emulated one, laid out as torch's own checks ask.

No CPU has these products.  Here they are replayed from the operands that the backend would hand over, read back by the
layouts' written definition; the kernels themselves run under ``pytest -m gpu``.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from autoprec.backends import LinearSpec, choose, get_backend, native_blocks
from autoprec.backends.native_blocks import BlockLinear, Operand, encode, kernel_refusal, multiply, pack_e2m1, swizzle
from autoprec.backends.operands import quantize_operand
from autoprec.plan import Formats
from autoprec.recipes import Block128Recipe, MXFP8Recipe, NVFP4Recipe

NVFP4 = NVFP4Recipe(hadamard=False, stochastic_rounding=False)
RECIPES: list[Any] = [
    Block128Recipe(),
    Block128Recipe(power_of_two=False),
    Block128Recipe(weight_2d=False, input_2d=True),
    MXFP8Recipe(),
    MXFP8Recipe(weight_2d=True, rounding="floor"),
    NVFP4,
    NVFP4Recipe(hadamard=False, stochastic_rounding=False, weight_2d=False),
]


def spec_of(recipe: Any) -> LinearSpec:
    return LinearSpec(formats=Formats.all("fp8_e4m3" if recipe.family == "fp8" else recipe.family), recipe=recipe)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Numbers over several orders of magnitude, with an empty block and a zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    x[:16, :16] = 0
    return x.bfloat16()


def value_of(code: int) -> float:
    """Of a 4-bit code: sign, two bits of exponent, one of mantissa (OCP microscaling)."""
    size = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    return -size if code & 8 else size


def unswizzled(flat: Tensor, rows: int, blocks: int) -> Tensor:
    """One byte at a time, as cuBLAS documents its layout of block scales."""
    tiles = -(-blocks // 4)
    where = [
        [((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4 for c in range(blocks)]
        for r in range(rows)
    ]
    return flat[torch.tensor(where)]


def read(side: Operand) -> Tensor:
    """The fp32 numbers that an operand stands for, by the declared kinds of its scales."""
    kind, stored = side.kinds[0], side.scales[0]
    rows = side.data.shape[0]
    if kind == ScalingType.BlockWise1x16:
        packed = side.data.view(torch.uint8)
        table = torch.tensor([value_of(code) for code in range(16)])
        data = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], 2).reshape(rows, -1)
        blocks = unswizzled(stored.view(torch.uint8), rows, data.shape[1] // 16).view(torch.float8_e4m3fn).float()
        return data * blocks.repeat_interleave(16, 1) * side.scales[1]
    data = side.data.float()
    if kind == ScalingType.BlockWise1x32:
        exponents = unswizzled(stored.view(torch.uint8), rows, data.shape[1] // 32).double() - 127
        return (data.double() * torch.exp2(exponents).repeat_interleave(32, 1)).float()
    if kind == ScalingType.BlockWise1x128:
        return data * stored.repeat_interleave(128, 1)
    assert kind == ScalingType.BlockWise128x128
    return data * stored.t()[:, : data.shape[1] // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_operands_are_those_of_the_emulated_backend(recipe: Any, role: Any) -> None:
    x, spec = draw(256, 384), spec_of(recipe)
    wanted = quantize_operand(x, getattr(spec.formats, role), recipe, role, "output").dequantize()
    got = read(encode(x, recipe, spec, role))
    if recipe.family == "nvfp4":  # the last scale is multiplied in another order here
        torch.testing.assert_close(got, wanted, rtol=2.0**-23, atol=0)
    else:
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("tokens", [256, 40])
def test_torch_accepts_the_layout_of_every_product(recipe: Any, tokens: int) -> None:
    spec = spec_of(recipe)
    with torch.device("meta"):  # where torch checks sizes, strides and dtypes as on CUDA
        x, grad = (torch.empty(tokens, k, dtype=torch.bfloat16) for k in (384, 256))
        weight = torch.empty(256, 384)
        padded = native_blocks._pad(x, 128)
        output = multiply(encode(padded, recipe, spec, "input"), encode(weight, recipe, spec, "weight"))
        assert (output.shape, output.dtype) == ((len(padded), 256), torch.bfloat16)
        assert native_blocks._grad_input(grad, weight, spec).shape == x.shape
        assert native_blocks._grad_weight(grad, x, spec).shape == weight.shape
        side = encode(weight, recipe, spec, "weight")
        broken = side._replace(scales=[side.scales[0][:-1], *side.scales[1:]])
        with pytest.raises(RuntimeError, match="must have"):  # and does refuse another layout
            multiply(encode(padded, recipe, spec, "input"), broken)


def replay(*args: Any, output_dtype: torch.dtype) -> Tensor:
    """``F.scaled_mm`` in fp32 from the operands as they are read back."""
    a_data, b_data, a_scales, a_kinds, b_scales, b_kinds, a_swizzles, b_swizzles = args
    for kinds, swizzles in ((a_kinds, a_swizzles), (b_kinds, b_swizzles)):
        block = kinds[0] in (ScalingType.BlockWise1x16, ScalingType.BlockWise1x32)
        assert swizzles[0] == (SwizzleType.SWIZZLE_32_4_4 if block else SwizzleType.NO_SWIZZLE)
    a = read(Operand(a_data, a_scales, a_kinds, a_swizzles))
    b = read(Operand(b_data.t(), b_scales, b_kinds, b_swizzles))
    return (a @ b.T).to(output_dtype)


@pytest.mark.parametrize("tokens", [128, 40])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_all_three_products_are_the_emulated_ones(recipe: Any, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.functional.scaled_mm", replay)
    results = []
    for function in (BlockLinear.apply, get_backend("emulated").linear):
        x, weight = draw(tokens, 256).requires_grad_(), draw(128, 256, seed=1).float().requires_grad_()
        bias = draw(1, 128, seed=2)[0].float().requires_grad_()
        output = function(x, weight, bias, spec_of(recipe))
        output.backward(draw(tokens, 128, seed=3))
        results.append([output.detach(), x.grad, weight.grad, bias.grad])
    for got, wanted in zip(*results, strict=True):
        assert got.dtype == wanted.dtype
        size = wanted.float().abs().amax()
        assert ((got.float() - wanted.float()).abs() <= wanted.float().abs() * 2.0**-7 + size * 2.0**-8).all()


@pytest.mark.parametrize("recipe", [Block128Recipe(backward="high_precision"), MXFP8Recipe(backward="high_precision")])
def test_gradients_in_high_precision_use_the_operands_as_they_came(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.functional.scaled_mm", replay)
    x, weight, grad = draw(40, 128).requires_grad_(), draw(128, 128, seed=1).requires_grad_(), draw(40, 128, seed=3)
    BlockLinear.apply(x, weight, None, spec_of(recipe)).backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.equal(x.grad, grad @ weight)
    assert torch.equal(weight.grad, grad.T @ x)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 12)])
def test_scales_are_swizzled_as_torchao_does(shape: tuple[int, int]) -> None:
    theirs = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    stored = torch.randint(0, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(swizzle(stored), theirs(stored).flatten())


def test_four_bit_codes_are_torchaos() -> None:
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    values = torch.tensor([value_of(code) for code in range(16)] * 2).reshape(2, 16)
    theirs = kernels.pack_uint4(kernels.f32_to_f4_unpacked(values))
    assert torch.equal(pack_e2m1(values).view(torch.uint8), theirs)


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "reason"),
    [
        (Block128Recipe(), (9, 0), "12.9", ""),
        (Block128Recipe(), (8, 9), "13.0", "needs compute capability 9.0 or newer, not 8.9"),
        (Block128Recipe(), (10, 0), "13.0", "has kernels before compute capability 10.0, and this is 10.0"),
        (Block128Recipe(), (9, 0), "12.8", "needs CUDA 12.9 or newer, not 12.8"),
        (MXFP8Recipe(), (9, 0), "13.0", "recipe 'mxfp8' needs compute capability 10.0 or newer, not 9.0"),
        (MXFP8Recipe(), (10, 3), "12.8", ""),
        (MXFP8Recipe(), (12, 0), "13.0", "has kernels before compute capability 12.0"),
        (NVFP4, (10, 0), "13.0", ""),
        (NVFP4, (10, 0), "12.6", "recipe 'nvfp4' needs CUDA 12.8 or newer"),
    ],
)
def test_what_each_gpu_has(recipe: Any, capability: tuple[int, int], cuda: str, reason: str) -> None:
    answer = kernel_refusal(recipe, capability, cuda)
    assert reason in answer
    assert bool(reason) == bool(answer)


@pytest.mark.parametrize(
    ("recipe", "weight", "dtype", "mode", "reason"),
    [
        (MXFP8Recipe(), (128, 128), torch.bfloat16, "training", ""),
        (NVFP4Recipe(), (128, 128), torch.bfloat16, "inference", ""),
        (NVFP4Recipe(), (128, 128), torch.bfloat16, "training", "no rotation and no stochastic rounding"),
        (MXFP8Recipe(), (48, 128), torch.bfloat16, "training", "out_features=48 isn't a multiple of 32"),
        (Block128Recipe(), (128, 160), torch.bfloat16, "training", "in_features=160 isn't a multiple of 128"),
        (MXFP8Recipe(), (128, 128), torch.float16, "training", "give bf16, and activations are torch.float16"),
        (MXFP8Recipe(backward="dequantized"), (128, 128), torch.bfloat16, "training", "backward='dequantized'"),
    ],
)
def test_refusals(recipe: Any, weight: tuple[int, int], dtype: torch.dtype, mode: Any, reason: str) -> None:
    tensors = torch.empty(64, weight[1], dtype=dtype, device="meta"), torch.empty(weight, device="meta")
    backend, why = choose("linear", spec_of(recipe).formats, *tensors, ("native",), mode, recipe=recipe)
    assert (backend is None) == bool(reason)
    assert reason in why


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_cpu_has_no_block_scales(recipe: Any) -> None:
    x, weight = draw(64, 128), draw(128, 128)
    backend, why = choose("linear", spec_of(recipe).formats, x, weight, ("native",), "training", recipe=recipe)
    assert backend is None
    assert f"torch's product on cpu has scales per tensor and per row, not those of '{recipe.name}'" in why


def test_a_recipe_and_formats_of_different_families() -> None:
    x, weight = draw(64, 128), draw(128, 128)
    _, why = choose("linear", Formats.all("fp8_e4m3"), x, weight, ("native",), "training", recipe=MXFP8Recipe())
    assert "recipe 'mxfp8' scales mxfp8, not fp8_e4m3" in why


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_gpu_multiplies_the_same(recipe: Any) -> None:
    x, weight = draw(96, 256).cuda(), draw(128, 256, seed=1).cuda()
    backend, why = choose("linear", spec_of(recipe).formats, x, weight, ("native",), "training", recipe=recipe)
    if backend is None:
        pytest.skip(why)
    results = []
    for kernel in (backend, get_backend("emulated")):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        output = kernel.linear(*leaves, None, spec_of(recipe))
        output.backward(draw(96, 128, seed=3).cuda())
        results.append([output.detach(), leaves[0].grad, leaves[1].grad])
    for got, wanted in zip(*results, strict=True):
        assert (got.float() - wanted.float()).norm() <= 2.0**-7 * wanted.float().norm()
