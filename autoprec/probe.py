"""The device in this machine as a target: its name looked up, its peaks measured once and cached."""

import fnmatch
import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autoprec import atomic
from autoprec.target import Target, list_targets

log = logging.getLogger(__name__)

#: 16 bit counts as fast when its matmul takes at most this share of fp32's time: below it, casts cost more than they bring.
FAST_SHARE = 0.8

_CACHE_SCHEMA = 1
_GEMM_SECONDS = 0.25
_FLAG_FORMATS = {"avx512_bf16": "bf16", "amx_bf16": "bf16", "avx512_fp16": "fp16", "amx_fp16": "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Measured on this machine.

    Args:
        peaks_flops: best of several square matmuls, by format.
        bandwidth_bytes_per_s: best of several copies, bytes read and written.
    """

    peaks_flops: dict[str, float]
    bandwidth_bytes_per_s: float


def probe_target() -> Target:
    """The accelerator torch sees, else the CPU; published numbers where the device is known, else measured ones."""
    if torch.cuda.is_available():
        return _probe_gpu()
    return _probe_cpu()


def cpu_info() -> tuple[str, frozenset[str]]:
    """Model name and feature flags of the processor; no flags where the system doesn't list them."""
    model, flags = "", frozenset[str]()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and not model:
            model = value.strip()
        if key.strip() in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
    return model or _platform_name(), flags


def measure_peaks(device: str, dtypes: dict[str, torch.dtype], size: int = 1024) -> Peaks:
    """Measure matmul and copy rates.

    Args:
        device: ``cpu`` or ``cuda``.
        dtypes: formats to measure and their dtypes.
        size: of the square matrices.
    """
    rates = {}
    for name, dtype in dtypes.items():
        left = torch.randn(size, size, device=device).to(dtype)
        right = torch.randn(size, size, device=device).to(dtype)
        rates[name] = 2 * size**3 / _best_seconds(lambda a=left, b=right: a @ b, device)
    source = torch.empty(64 * 2**20, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    seconds = _best_seconds(lambda: destination.copy_(source), device)
    return Peaks(peaks_flops=rates, bandwidth_bytes_per_s=2 * source.numel() / seconds)


def cached_peaks(device: str, name: str, dtypes: dict[str, torch.dtype], size: int = 1024) -> Peaks:
    """As :func:`measure_peaks`, kept on disk by device, number of threads and torch version.

    A cache that can't be read is measured again; one that can't be written is said once in the log.
    """
    key = f"{name}|{torch.get_num_threads()}|{torch.__version__}|{','.join(sorted(dtypes))}|{size}"
    path = cache_folder() / f"peaks-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    peaks = _read_cache(path, key)
    if peaks is None:
        peaks = measure_peaks(device, dtypes, size)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, json.dumps({"schema": _CACHE_SCHEMA, "key": key, **asdict(peaks)}, indent=1) + "\n")
        except OSError as error:
            log.warning("measured peaks can't be kept in %s (%s): they are measured again next time", path, error)
    return peaks


def cache_folder() -> Path:
    """Where measurements are kept: ``$AUTOPREC_CACHE_DIR``, or the system's cache folder of the user."""
    chosen = os.environ.get("AUTOPREC_CACHE_DIR")
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("autoprec", appauthor=False))


def _probe_cpu() -> Target:
    model, flags = cpu_info()
    dtypes = {"fp32": torch.float32}
    for flag, name in _FLAG_FORMATS.items():
        if flag in flags:
            dtypes[name] = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    peaks = cached_peaks("cpu", model, dtypes)
    fp32 = peaks.peaks_flops["fp32"]
    fast = [name for name in ("bf16", "fp16") if peaks.peaks_flops.get(name, 0.0) * FAST_SHARE >= fp32]
    how = f"measured here with torch {torch.__version__}, {torch.get_num_threads()} threads"
    return Target(
        name="cpu",
        title=model,
        kind="cpu",
        formats=(*fast, "fp32"),
        low_format=fast[0] if fast else "fp32",
        peaks_flops=peaks.peaks_flops,
        bandwidth_bytes_per_s=peaks.bandwidth_bytes_per_s,
        memory_bytes=_system_memory_bytes(),
        backends=("emulated",),
        sources=dict.fromkeys((*(f"peaks_flops.{n}" for n in peaks.peaks_flops), "bandwidth_bytes_per_s"), how),
        measured=True,
        note=f"processor flags: {', '.join(sorted(set(_FLAG_FORMATS) & flags)) or 'none for 16 bit'}",
    )


def _probe_gpu() -> Target:
    properties = torch.cuda.get_device_properties(0)
    name = str(properties.name)
    kind = "rocm" if torch.version.hip else "cuda"
    shipped = [t for t in list_targets() if t.kind == kind and any(fnmatch.fnmatch(name, g) for g in t.device_names)]
    if shipped:
        # the same product is sold with more than one memory size: the driver knows this one's
        return replace(shipped[0], title=name, memory_bytes=int(properties.total_memory))
    major, minor = torch.cuda.get_device_capability(0)
    dtypes = {"fp32": torch.float32, "fp16": torch.float16}
    if kind == "rocm" or major >= 8:
        dtypes["bf16"] = torch.bfloat16
    peaks = cached_peaks("cuda", name, dtypes, size=4096)
    fp8 = ("fp8_e4m3", "fp8_e5m2") if kind == "cuda" and (major, minor) >= (8, 9) else ()
    low = "bf16" if "bf16" in dtypes else "fp16"
    formats = (*fp8, *(f for f in ("bf16", "fp16") if f in dtypes), "fp32")
    how = f"measured here with torch {torch.__version__}"
    return Target(
        name=name.lower().replace(" ", "-"),
        title=name,
        kind=kind,
        formats=formats,
        low_format=low,
        peaks_flops=peaks.peaks_flops,
        bandwidth_bytes_per_s=peaks.bandwidth_bytes_per_s,
        memory_bytes=int(properties.total_memory),
        alignment=dict.fromkeys(fp8, 16),
        backends=("transformer_engine", "torchao", "native", "emulated") if fp8 else ("emulated",),
        sources=dict.fromkeys((*(f"peaks_flops.{n}" for n in peaks.peaks_flops), "bandwidth_bytes_per_s"), how),
        measured=True,
        note=f"no shipped target has this name; compute capability {major}.{minor}",
    )


def _best_seconds(run: Any, device: str) -> float:
    """Shortest of at least three calls within a time limit, after one to warm up."""
    _finish(run(), device)
    times: list[float] = []
    deadline = time.perf_counter() + _GEMM_SECONDS
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < 50):
        start = time.perf_counter()
        _finish(run(), device)
        times.append(time.perf_counter() - start)
    return min(times)


def _finish(result: torch.Tensor, device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(result.device)


def _read_cache(path: Path, key: str) -> Peaks | None:
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["schema"] != _CACHE_SCHEMA or data["key"] != key:
            return None
        flops = {str(name): float(value) for name, value in data["peaks_flops"].items()}
        peaks = Peaks(peaks_flops=flops, bandwidth_bytes_per_s=float(data["bandwidth_bytes_per_s"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.info("%s can't be used (%s): measuring again", path, error)
        return None
    good = flops.keys() >= {"fp32"} and all(0 < v < 1e18 for v in (*flops.values(), peaks.bandwidth_bytes_per_s))
    return peaks if good else None


def _system_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _platform_name() -> str:
    import platform

    return platform.processor() or platform.machine() or "unknown CPU"
