"""Scales: bit-equal to the formulas of the libraries, written out here once more with numpy's scalar fp32."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from autoprec.formats import scales

F32 = np.float32
LARGEST = np.finfo(F32).max
TINY = np.array([1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF, 0x800000], np.uint32).view(F32)
AMAXES = np.concatenate(
    [
        np.array([0.0, 448.0, 57344.0, 6.0, 1.0, 1e-12, 9.99e-13, 1e-30, LARGEST, np.inf, np.nan], F32),
        TINY,
        (F32(448) * F32(2.0) ** np.arange(-12, 12, dtype=F32)).astype(F32),
        np.nextafter((F32(448) * F32(2.0) ** np.arange(-12, 12, dtype=F32)).astype(F32), F32(np.inf)),
        np.random.default_rng(0).integers(0, 0x7F800000, 20_000, dtype=np.uint32).view(F32),
    ]
)
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value):RuntimeWarning")


def assert_same(got: torch.Tensor, wanted: list[F32] | np.ndarray) -> None:
    np.testing.assert_array_equal(got.numpy().view(np.int32), np.asarray(wanted, F32).view(np.int32))


def floor_to_power_of_two(scale: F32) -> F32:
    return np.array([scale.view(np.uint32) & 0xFF800000], np.uint32).view(F32)[0]


def transformer_engine(amax: F32, largest: float, epsilon: float = 0.0, power_of_two: bool = False) -> F32:
    amax = F32(epsilon) if amax < epsilon else amax
    if np.isinf(amax) or np.isnan(amax) or amax == 0:
        return F32(1)
    scale = F32(largest) / amax
    scale = LARGEST if np.isinf(scale) else scale
    return floor_to_power_of_two(scale) if power_of_two else scale


@pytest.mark.parametrize("largest", [448.0, 57344.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_current_scale(largest: float, epsilon: float, power_of_two: bool) -> None:
    got = scales.current_scale(torch.from_numpy(AMAXES), largest, epsilon=epsilon, power_of_two=power_of_two)
    assert_same(got, [transformer_engine(a, largest, epsilon, power_of_two) for a in AMAXES])


def test_current_scale_of_a_block_overflows_to_the_inputs_largest() -> None:
    got = scales.current_scale(torch.tensor([1e-38]), 448.0, if_infinite=float(torch.finfo(torch.bfloat16).max))
    assert got.item() == torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_torchao_scale(largest: float) -> None:
    got = scales.torchao_scale(torch.from_numpy(AMAXES), largest)
    wanted = [F32(largest / max(float(a), 1e-12)) if not np.isnan(a) else F32(np.nan) for a in AMAXES]
    assert torch.equal(got.nan_to_num(-1.0), torch.tensor(wanted).nan_to_num(-1.0))


@pytest.mark.filterwarnings("ignore")  # torchao's import warns about its own kernels
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_torchao_scale_is_torchaos(dtype: torch.dtype, power_of_two: bool) -> None:
    torchao_utils = pytest.importorskip("torchao.float8.float8_utils")
    amax = torch.from_numpy(AMAXES)
    wanted = torchao_utils.amax_to_scale(amax, dtype, round_scales_to_power_of_2=power_of_two)
    got = scales.torchao_scale(amax, torch.finfo(dtype).max, power_of_two=power_of_two)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_torchao_and_transformer_engine_agree_away_from_zero() -> None:
    amax = torch.from_numpy(AMAXES)
    amax = amax[(amax >= 1e-12) & amax.isfinite()]
    assert torch.equal(scales.torchao_scale(amax, 448.0), scales.current_scale(amax, 448.0))


def e8m0(amax: F32, largest: float) -> int:
    v = amax * F32(1.0 / largest)
    if np.isnan(v):
        return 0xFF
    if np.isinf(v):
        return 0xFE
    bits = int(v.view(np.uint32))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = mantissa != 0 and not (exponent == 0 and mantissa <= 0x400000)
    return min(exponent + up, 0xFE)


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_e8m0_exponent(largest: float) -> None:
    got = scales.e8m0_exponent(torch.from_numpy(AMAXES), largest)
    assert got.tolist() == [e8m0(a, largest) for a in AMAXES]


def test_e8m0_exponent_never_lets_a_block_saturate_and_floor_does() -> None:
    amax = torch.from_numpy(AMAXES[np.isfinite(AMAXES) & (AMAXES > 1e-30)]).double()
    ceil = amax.float() * scales.e8m0_scale(scales.e8m0_exponent(amax.float()))
    floor = amax.float() * scales.e8m0_scale(scales.e8m0_exponent(amax.float(), rounding="floor"))
    assert ceil.max() <= 448
    assert 256 <= floor.min() <= floor.max() < 512
    assert (floor > 448).any()


def test_e8m0_scales_are_powers_of_two_and_inverses() -> None:
    exponent = torch.arange(256, dtype=torch.int32)
    scale, scale_inv = scales.e8m0_scale(exponent), scales.e8m0_scale_inv(exponent)
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(F32)
    assert_same(scale_inv[:255], codes[:255])
    assert torch.equal(scale[:255].double() * scale_inv[:255].double(), torch.ones(255, dtype=torch.float64))
    assert scale[254].item() == 2.0**-127
    assert scale[255].isnan()
    assert scale_inv[255].isnan()


@pytest.mark.filterwarnings("ignore")
def test_e8m0_exponent_is_torchaos_rceil() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    # One ulp above 448 * 2**k torchao's quotient by 448 rounds to a power of two and the product doesn't.
    mantissa = AMAXES.view(np.uint32) & 0x7FFFFF
    amax = torch.from_numpy(AMAXES[np.isfinite(AMAXES) & (mantissa != 0x600001)])
    assert 448.0 in amax
    blocks = torch.zeros(len(amax), 32)
    blocks[:, 0] = amax
    codes, _ = mx.to_mx(blocks, torch.float8_e4m3fn, 32, scaling_mode=config.ScaleCalculationMode.RCEIL)
    assert torch.equal(codes.view(torch.uint8).flatten().int(), scales.e8m0_exponent(amax))


def nvfp4(tensor_amax: F32, block_amax: F32) -> tuple[F32, F32, F32]:
    with np.errstate(all="ignore"):
        tensor_scale = min(F32(2688) / tensor_amax, LARGEST) if tensor_amax != 0 else F32(1)
        tensor_scale = F32(1) if tensor_scale == 0 else tensor_scale
        block = min(block_amax * (tensor_scale * F32(1 / 6)), LARGEST)
        block = min(block, F32(448)).astype(ml_dtypes.float8_e4m3fn).astype(F32)
        scale = min(F32(1) / (block * (F32(1) / tensor_scale)), LARGEST)
    return tensor_scale, block, scale


@pytest.mark.parametrize("tensor_amax", [0.0, 1e-42, 1e-30, 0.37, 6.0, 2688.0, 3.3e38, math.inf])
def test_nvfp4_scales(tensor_amax: float) -> None:
    part = np.random.default_rng(1).random(2000, F32)
    part[:3] = 0.0, 1.0, 1e-4
    amaxes = (F32(tensor_amax) * part).astype(F32) if math.isfinite(tensor_amax) else part
    tensor_scale = scales.nvfp4_tensor_scale(torch.tensor(tensor_amax))
    block = scales.nvfp4_block_scale_inv(torch.from_numpy(amaxes), tensor_scale)
    scale = scales.nvfp4_scale(block, tensor_scale)
    wanted = [nvfp4(F32(tensor_amax), a) for a in amaxes]
    assert tensor_scale.item() == wanted[0][0]
    assert_same(block, [w[1] for w in wanted])
    assert_same(scale, [w[2] for w in wanted])


def test_delayed_scale_follows_the_fused_update() -> None:
    history = torch.tensor([[3.0, 0.0, 5.0], [9.0, 1.0, 1.0], [2.0, 2.0, torch.inf]])
    scale = torch.tensor([1.0, 7.0, 11.0])
    rolled, renewed = scales.delayed_scale(history, scale, 448.0)
    # The oldest amax of tensor 0 (9) is gone; tensor 1 wasn't seen; tensor 2's infinity keeps its scale.
    assert rolled.tolist() == [[0.0, 0.0, 0.0], [2.0, 1.0, torch.inf], [3.0, 2.0, 5.0]]
    assert renewed.tolist() == [F32(448) / F32(3), 7.0, 11.0]
    _, recent = scales.delayed_scale(history, scale, 448.0, margin=1, algorithm="most_recent")
    assert recent.tolist() == [F32(224) / F32(3), 7.0, F32(224) / F32(5)]


def test_delayed_scale_with_a_history_of_one_step() -> None:
    rolled, renewed = scales.delayed_scale(torch.tensor([[4.0]]), torch.ones(1), 448.0)
    assert rolled.tolist() == [[0.0]]
    assert renewed.tolist() == [112.0]
