"""Probing this machine: real measurements, a cache that survives damage, and names looked up as drivers give them."""

import json
import logging

import pytest
import torch

from autoprec import probe
from autoprec.target import list_targets, load_target


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("AUTOPREC_CACHE_DIR", str(folder))
    monkeypatch.setattr(probe, "_CPU_SIZE", 128)
    monkeypatch.setattr(probe, "_SECONDS_EACH", 0.02)
    return folder


def test_measured_peaks_are_positive_and_per_format():
    peaks = probe.measure_peaks("cpu", ["fp32", "bf16"], 64)
    assert peaks.peaks_flops.keys() == {"fp32", "bf16"}
    assert all(flops > 0 for flops in peaks.peaks_flops.values())
    assert 1e8 < peaks.bandwidth_bytes_per_s < 1e13


def test_format_that_cannot_be_multiplied_is_left_out_and_said(caplog):
    with caplog.at_level(logging.INFO, "autoprec.probe"):
        peaks = probe.measure_peaks("cpu", ["fp32", "nvfp4"], 64)
    assert peaks.peaks_flops.keys() == {"fp32"}
    assert "the peak of nvfp4 on cpu isn't measured" in caplog.text


def test_fp8_matmul_is_a_real_product():
    product = probe._matmul("fp8_e4m3", "cpu", 32)()
    assert product.shape == (32, 32)
    assert product.dtype == torch.bfloat16
    assert product.float().std() == pytest.approx(32**0.5, rel=0.3)


def test_cache_is_used_and_damage_is_measured_again(cache):
    first = probe.cached_peaks("cpu", "some cpu", ["fp32"], 64)
    (path,) = cache.iterdir()
    assert probe.cached_peaks("cpu", "some cpu", ["fp32"], 64) == first
    good = json.loads(path.read_text())
    assert good["peaks_flops"] == first.peaks_flops
    damages = ["", "{", "[]", "null", json.dumps(good | {"schema": 99}), json.dumps(good | {"key": "another"})]
    damages += [json.dumps(good | {"peaks_flops": {}}), json.dumps(good | {"bandwidth_bytes_per_s": "fast"})]
    damages += [json.dumps(good | {"peaks_flops": {"fp32": -1}}), "\x00" * 10]
    for damage in damages:
        path.write_text(damage)
        again = probe.cached_peaks("cpu", "some cpu", ["fp32"], 64)
        assert again != first, damage
        assert json.loads(path.read_text())["peaks_flops"] == again.peaks_flops


def test_cache_key_tells_machines_apart(cache):
    probe.cached_peaks("cpu", "one", ["fp32"], 64)
    probe.cached_peaks("cpu", "two", ["fp32"], 64)
    probe.cached_peaks("cpu", "two", ["fp32", "bf16"], 64)
    assert len(list(cache.iterdir())) == 3


def test_unwritable_cache_is_said(cache, caplog):
    cache.write_text("a file where the folder should be")
    peaks = probe.cached_peaks("cpu", "some cpu", ["fp32"], 64)
    assert peaks.peaks_flops["fp32"] > 0
    assert "can't be kept" in caplog.text


def test_auto_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target = load_target("auto")
    assert (target.kind, target.measured) == ("cpu", True)
    assert load_target(target.name).low_format in ("fp32", target.low_format)
    assert target.formats[-1] == "fp32"
    assert target.low_format in target.formats
    assert target.memory_bytes is None or target.memory_bytes > 2**28
    assert all("measured here" in source for source in target.sources.values())


@pytest.mark.parametrize(
    ("flags", "rates", "formats", "name"),
    [
        ({"avx2"}, {"fp32": 1e11}, ("fp32",), "cpu"),
        ({"avx512_bf16"}, {"fp32": 1e11, "bf16": 2e11}, ("bf16", "fp32"), "cpu-avx512-bf16"),
        ({"avx512_bf16"}, {"fp32": 1e11, "bf16": 1.1e11}, ("fp32",), "cpu"),
        ({"avx512_bf16", "amx_tile", "amx_bf16"}, {"fp32": 1e11, "bf16": 9e11}, ("bf16", "fp32"), "cpu-amx"),
        ({"avx512_bf16", "amx_fp16"}, {"fp32": 1e11, "bf16": 1e10, "fp16": 9e11}, ("fp16", "fp32"), "cpu"),
        (set(), {"fp32": 1e11, "bf16": 3e11, "fp16": 1e10}, ("bf16", "fp32"), "cpu"),
    ],
)
def test_16_bit_counts_only_where_measured_faster(monkeypatch, flags, rates, formats, name):
    asked = []

    def peaks(device, name, wanted, size):
        asked.extend(wanted)
        return probe.Peaks(peaks_flops=rates, bandwidth_bytes_per_s=1e10)

    monkeypatch.setattr(probe, "cpu_info", lambda: ("A CPU", frozenset(flags)))
    monkeypatch.setattr(probe, "cached_peaks", peaks)
    target = probe._probe_cpu()
    assert asked == list(rates)
    assert target.formats == formats
    assert target.low_format == formats[0]
    assert target.name == name


def test_cpu_info_names_this_processor():
    model, flags = probe.cpu_info()
    assert model
    assert all(" " not in flag for flag in flags)


@pytest.mark.parametrize(
    ("device", "kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "cuda", "h100"), ("NVIDIA H200", "cuda", "h200"),
        ("NVIDIA GH200 480GB", "cuda", None),
        ("NVIDIA A100-SXM4-80GB", "cuda", "a100"), ("NVIDIA A10", "cuda", "a10"), ("NVIDIA A10G", "cuda", None),
        ("NVIDIA L4", "cuda", "l4"), ("NVIDIA L40S", "cuda", "l40s"), ("Tesla T4", "cuda", "t4"),
        ("Tesla V100-SXM2-32GB", "cuda", "v100"), ("NVIDIA GeForce RTX 4090", "cuda", "rtx4090"),
        ("NVIDIA B200", "cuda", "b200"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "cuda", None), ("AMD Instinct MI300X", "rocm", "mi300x"),
        ("AMD Instinct MI300X", "cuda", None),
    ],
)  # fmt: skip
def test_device_names(device, kind, name):
    found = probe.known_gpu(device, kind)
    assert (found.name if found else None) == name


def test_a_device_name_belongs_to_one_target():
    import fnmatch

    for target in list_targets():
        for glob in target.device_names:
            sample = glob.replace("*", "NVIDIA ", 1) if glob.startswith("*") else glob
            matching = [t.name for t in list_targets() if any(fnmatch.fnmatchcase(sample, g) for g in t.device_names)]
            assert matching == [target.name]


@pytest.mark.gpu
def test_auto_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device")
    target = load_target("auto")
    assert target.kind in ("cuda", "rocm")
    assert target.measured
    assert target.peaks_flops["fp32"] < target.peaks_flops[target.low_format]
