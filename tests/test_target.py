"""Targets: every number sane and sourced; unknown is absent; a wrong file says what is wrong."""

import dataclasses
import math
import re

import pytest

from autoprec.errors import RuleError, TargetError
from autoprec.formats import FORMATS
from autoprec.target import list_targets, load_target

NAMES = {
    "a10", "a100", "apple-m", "ascend-910b", "b200", "cambricon-mlu590", "cpu", "cpu-amx", "cpu-avx512-bf16", "gaudi3",
    "h100", "h200", "l4", "l40s", "mi300x", "mi355x", "rtx4090", "rtx5090", "t4", "trainium2", "v100",
}  # fmt: skip
TARGETS = {target.name: target for target in list_targets()}
BACKENDS = {"transformer_engine", "torchao", "native", "emulated"}

every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


def test_all_are_there():
    assert TARGETS.keys() == NAMES
    assert all(load_target(name) is load_target(name) for name in NAMES)


@every_target
def test_every_number_has_a_public_source_with_a_date(target):
    numbers = {f"peaks_flops.{name}" for name in target.peaks_flops} | {
        f"alignment.{name}" for name in target.alignment
    }
    numbers |= {key for key in ("bandwidth_bytes_per_s", "memory_bytes") if getattr(target, key) is not None}
    assert target.sources.keys() == numbers
    for source in target.sources.values():
        assert re.match(r"https://\S+ \(20\d\d-\d\d\)", source), source
    assert not target.measured
    assert bool(target.source) == bool(numbers)


@every_target
def test_numbers_are_of_the_right_order(target):
    assert all(5e11 <= flops <= 2e16 for flops in target.peaks_flops.values())
    assert target.bandwidth_bytes_per_s is None or 0.05e12 <= target.bandwidth_bytes_per_s <= 20e12
    assert target.memory_bytes is None or 8e9 <= target.memory_bytes <= 1e12
    assert all(value in (4, 8, 16, 32, 128) for value in target.alignment.values())


@every_target
def test_peaks_do_not_fall_with_the_bits(target):
    chains = [
        ("fp32", "tf32", "bf16", "fp8_e4m3", "nvfp4"),
        ("fp32", "fp16", "fp8_e5m2", "mxfp8"),
        ("fp16", "int8", "int4"),
    ]
    for chain in chains:
        peaks = [target.peaks_flops[name] for name in chain if name in target.peaks_flops]
        assert peaks == sorted(peaks)
    # halving the bits at most doubles the rate, within the rounding of datasheets
    by_bits = {
        FORMATS[name].bits: flops for name, flops in target.peaks_flops.items() if name in ("bf16", "fp16", "fp8_e4m3")
    }
    if {16, 8} <= by_bits.keys():
        assert by_bits[8] <= 2.05 * by_bits[16]


@every_target
def test_formats_and_backends_exist(target):
    assert set(target.formats) <= set(FORMATS)
    assert target.formats[-1] == "fp32"
    assert target.low_format in target.formats
    assert set(target.backends) <= BACKENDS
    assert "emulated" in target.backends
    assert any(name.startswith("fp8") for name in target.formats) == bool(
        {"native", "torchao"} & set(target.backends)
    ) or (target.name in ("a100", "a10"))
    assert bool(target.cpu_flags) == (target.name in ("cpu-amx", "cpu-avx512-bf16"))


@pytest.mark.parametrize(
    ("name", "low", "first"),
    [("v100", "fp16", "fp16"), ("t4", "fp16", "fp16"), ("a100", "bf16", "bf16"), ("h100", "bf16", "fp8_e4m3"),
     ("cpu", "fp32", "fp32"), ("cpu-amx", "bf16", "bf16"), ("mi300x", "bf16", "fp8_e4m3fnuz")],
)  # fmt: skip
def test_formats_that_rules_choose(name, low, first):
    assert (load_target(name).low_format, load_target(name).formats[0]) == (low, first)


def test_published_ratios():
    h100, a100, h200 = load_target("h100"), load_target("a100"), load_target("h200")
    assert h100.peak("fp8_e4m3") == 2 * h100.peak("bf16")
    assert math.isclose(a100.peak("bf16"), 2 * a100.peak("tf32"))
    assert h200.peaks_flops == h100.peaks_flops
    assert h200.bandwidth_bytes_per_s > h100.bandwidth_bytes_per_s


def test_unknown_number_and_target():
    with pytest.raises(TargetError, match=r"peak of bf16 on v100 isn't known; known: fp32, fp16"):
        load_target("v100").peak("bf16")
    with pytest.raises(TargetError, match=r"no target 'h10'; did you mean 'h100'\? known: auto, a10, "):
        load_target("h10")
    with pytest.raises(TargetError, match=r"no target '\.\./targets/h100'"):
        load_target("../targets/h100")
    assert load_target("v100").align("bf16") == 1
    assert load_target("h100").align("fp8_e4m3") == 16


GOOD = """
name = "mine"
title = "My accelerator"
kind = "cuda"
formats = ["bf16", "fp32"]
low_format = "bf16"
backends = ["emulated"]
[peaks_flops]
bf16 = { value = 1e12, source = "me" }
[sources.me]
url = "https://example.org"
date = "2026-11"
"""


def test_own_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    target = load_target(path)
    assert target.peak("bf16") == 1e12
    assert target.sources == {"peaks_flops.bf16": "https://example.org (2026-11)"}
    assert dataclasses.replace(target, name="x").name == "x"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"bf16", "fp32"', '"bf17", "fp32"', r"formats has bf17; allowed: .*bf16"),
        ('kind = "cuda"', 'kind = "tpu"', r"kind = 'tpu' isn't one of cpu, cuda"),
        ('source = "me"', 'source = "you"', r"peaks_flops bf16: source = 'you' isn't one of me"),
        (', source = "me"', "", r"source = '' isn't one of me|source is missing"),
        ("value = 1e12", "value = -1", r"value = -1 must be a number above 0"),
        ("value = 1e12", 'value = "1e12"', r"value = '1e12' must be a number"),
        ("value = 1e12", "value = nan", r"value = nan must be a number"),
        ("[peaks_flops]\nbf16", "[peaks_flops]\nbf15", r"'bf15' isn't a format"),
        ("name =", "bandwith = 3\nname =", r"unknown key 'bandwith'; allowed: .*bandwidth_bytes_per_s"),
        ('date = "2026-11"', "", r"sources me: date is missing"),
        ('low_format = "bf16"', 'low_format = "fp8_e4m3"', r"low_format = 'fp8_e4m3' isn't one of bf16, fp16, fp32"),
    ],
)
def test_wrong_file_says_so(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(RuleError, match=message):
        load_target(path)
