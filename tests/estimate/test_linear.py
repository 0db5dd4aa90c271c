"""The roofline of one layer: what it counts, by hand."""

from dataclasses import replace

import pytest

from autoprec.errors import TargetError, UsageError
from autoprec.estimate import LinearShape, Roofline, estimate_from_json, linear_gain, linear_seconds
from autoprec.estimate.roofline import GPU_LAUNCH_S, bytes_of
from autoprec.measure import measurement_from_json
from autoprec.plan import Formats
from autoprec.target import load_target

H100 = load_target("h100")
HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
BF16 = Formats.all("bf16")

#: Round numbers, taken as measured: 1e12 FLOP/s in fp32, 2e12 in bf16, 4e12 in fp8, 1e9 bytes/s.
ROUND = replace(
    H100,
    name="round",
    measured=True,
    peaks_flops={"fp32": 1e12, "bf16": 2e12, "fp8_e4m3": 4e12, "fp8_e5m2": 4e12},
    bandwidth_bytes_per_s=1e9,
)


def shape(tokens, inputs, outputs, **options):
    return LinearShape(num_tokens=tokens, in_features=inputs, out_features=outputs, **options)


def test_an_op_takes_its_arithmetic_its_bytes_or_its_launch():
    roof = Roofline(ROUND)
    assert roof.seconds(1e6, 1e15, "bf16") == 500
    assert roof.seconds(1e12, 1e9, "bf16") == 1000
    assert roof.seconds(1, 1, "bf16") == GPU_LAUNCH_S


def test_published_peaks_are_not_reached_and_measured_ones_are():
    assert Roofline(H100).peak("bf16") < H100.peak("bf16")
    assert Roofline(ROUND).peak("bf16") == 2e12
    assert Roofline(H100).bandwidth < H100.bandwidth_bytes_per_s


def test_unknown_numbers_are_errors():
    with pytest.raises(TargetError, match="peak of int8"):
        Roofline(replace(ROUND, peaks_flops={"bf16": 1.0})).seconds(1, 1, "int8")
    with pytest.raises(TargetError, match="bandwidth of round"):
        Roofline(replace(ROUND, bandwidth_bytes_per_s=None)).seconds(1)


def test_bytes_of_formats():
    assert [bytes_of(name) for name in ("fp32", "tf32", "bf16", "fp8_e4m3", "int4")] == [4, 4, 2, 1, 0.5]


def test_inference_in_16_bit_is_one_product_with_a_kept_weight():
    work = shape(1000, 2000, 3000)
    moved = 2 * (1000 * 2000 + 2000 * 3000 + 1000 * 3000)
    assert linear_seconds(work, ROUND, BF16, "bf16", "inference") == pytest.approx(moved / 1e9)


def test_training_in_16_bit_adds_two_products_and_the_casts_of_weight_and_gradient():
    work = shape(1000, 2000, 3000)
    moved = 3 * 2 * (1000 * 2000 + 2000 * 3000 + 1000 * 3000) + 2 * 6 * 2000 * 3000
    assert linear_seconds(work, ROUND, BF16, "bf16", "training") == pytest.approx(moved / 1e9)


def test_fp32_has_no_casts():
    work = shape(1000, 2000, 3000)
    moved = 4 * (1000 * 2000 + 2000 * 3000 + 1000 * 3000)
    assert linear_seconds(work, ROUND, Formats.all("fp32"), "fp32", "training") == pytest.approx(3 * moved / 1e9)


def test_a_frozen_weight_saves_its_gradients_product():
    work, frozen = shape(4096, 4096, 4096), shape(4096, 4096, 4096, trains_weight=False)
    for formats in (BF16, HYBRID):
        training, inference = (linear_seconds(work, H100, formats, "bf16", mode) for mode in ("training", "inference"))
        assert inference < linear_seconds(frozen, H100, formats, "bf16", "training") < training


def test_casts_are_counted():
    free = replace(H100, bandwidth_bytes_per_s=1e18)
    work = shape(8192, 4096, 4096)
    assert linear_gain(work, free, HYBRID, "bf16", "training").value == pytest.approx(2.0, abs=0.15)
    assert linear_gain(work, H100, HYBRID, "bf16", "training").value < 1.6


def test_gain_grows_with_size_and_launches_rule_the_small():
    gains = [linear_gain(shape(8192, n, n), H100, HYBRID, "bf16", "training").value for n in (64, 1024, 4096, 16384)]
    assert gains == sorted(gains)
    assert gains[0] < 0.5 < 1.5 < gains[-1] < 2


@pytest.mark.parametrize(("tokens", "as_many"), [(1, 16), (16, 16), (17, 32), (8191, 8192)])
def test_tokens_are_padded_below_16_bit_only(tokens, as_many):
    work, padded = shape(tokens, 8192, 8192), shape(as_many, 8192, 8192)
    same = [linear_seconds(s, H100, HYBRID, "bf16", "training") for s in (work, padded)]
    assert same[0] == same[1]
    if tokens != as_many:
        assert linear_seconds(work, ROUND, BF16, "bf16", "training") < linear_seconds(
            padded, ROUND, BF16, "bf16", "training"
        )


def test_published_speedup_of_large_models_is_near():
    """1.57 is published for a whole model of 5e9 parameters on an H200; its layers alone gain somewhat more."""
    h200 = load_target("h200")
    gain = linear_gain(shape(8192, 4096, 16384), h200, HYBRID, "bf16", "training").value
    assert 1.5 < gain < 1.8


def test_an_estimate_is_no_measurement():
    estimate = linear_gain(shape(8192, 4096, 4096), H100, HYBRID, "bf16", "training")
    assert str(estimate).endswith("x (estimated on h100)")
    data = estimate.to_json()
    assert data["kind"] == "estimated"
    assert estimate_from_json(data) == estimate
    with pytest.raises(UsageError, match="wanted a measurement, got one of kind 'estimated'"):
        measurement_from_json(data)
    with pytest.raises(UsageError, match="wanted an estimate, got one of kind 'measured'"):
        estimate_from_json({"kind": "measured", "value": 1.0})
