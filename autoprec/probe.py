"""The device in this machine as a target: its name looked up, its peaks measured once and cached."""

import fnmatch
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from autoprec import atomic
from autoprec.formats import get_format
from autoprec.target import Target, list_targets

log = logging.getLogger(__name__)

#: 16 bit is fast when its matmul takes at most this share of fp32's time: above it, casts cost more than they bring.
FAST_SHARE = 0.8

_CACHE_SCHEMA = 1
_SECONDS_EACH = 0.25
_MAX_ROUNDS = 50
_CPU_SIZE, _GPU_SIZE = 1024, 8192

#: Processor flag (x86, then Arm) → format with instructions of its own.
_FLAG_FORMATS = {
    "avx512_bf16": "bf16",
    "amx_bf16": "bf16",
    "bf16": "bf16",
    "avx512_fp16": "fp16",
    "amx_fp16": "fp16",
    "asimdhp": "fp16",
}


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


def measure_peaks(device: str, formats: Iterable[str], size: int) -> Peaks:
    """Measure matmul and copy rates, a fraction of a second each.

    A format that this device or torch can't multiply is left out, and the log says why.

    Args:
        device: ``cpu`` or ``cuda``.
        formats: names of formats.
        size: of the square matrices.
    """
    matmuls: dict[str, Callable[[], torch.Tensor]] = {}
    for name in formats:
        try:
            matmuls[name] = _matmul(name, device, size)
            _finish(matmuls[name](), device)
        except (RuntimeError, NotImplementedError) as error:
            matmuls.pop(name, None)
            log.info("the peak of %s on %s isn't measured: %s", name, device, error)
    seconds = _best_seconds(matmuls, device)
    rates = {name: 2 * size**3 / best for name, best in seconds.items()}
    source = torch.empty(64 * 2**20, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    copy = _best_seconds({"copy": lambda: destination.copy_(source)}, device)["copy"]
    return Peaks(peaks_flops=rates, bandwidth_bytes_per_s=2 * source.numel() / copy)


def cached_peaks(device: str, name: str, formats: Iterable[str], size: int) -> Peaks:
    """As :func:`measure_peaks`, kept on disk by device, number of threads and torch version.

    A cache that can't be read is measured again; one that can't be written is said in the log.
    """
    formats = tuple(formats)
    key = f"{device}|{name}|{torch.get_num_threads()}|{torch.__version__}|{','.join(formats)}|{size}"
    path = cache_folder() / f"peaks-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    peaks = _read_cache(path, key)
    if peaks is None:
        peaks = measure_peaks(device, formats, size)
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
    named = {name for flag, name in _FLAG_FORMATS.items() if flag in flags}
    # where the system lists no flags at all, only a measurement can tell
    formats = ("fp32", *(name for name in ("bf16", "fp16") if name in named or not flags))
    peaks = cached_peaks("cpu", model, formats, _CPU_SIZE)
    fp32 = peaks.peaks_flops["fp32"]
    fast = tuple(name for name in formats[1:] if peaks.peaks_flops.get(name, 0.0) * FAST_SHARE >= fp32)
    return Target(
        name=_cpu_name(flags) if "bf16" in fast else "cpu",
        title=model,
        kind="cpu",
        formats=(*fast, "fp32"),
        low_format=fast[0] if fast else "fp32",
        peaks_flops=peaks.peaks_flops,
        bandwidth_bytes_per_s=peaks.bandwidth_bytes_per_s,
        memory_bytes=_system_memory_bytes(),
        backends=("emulated",),
        cpu_flags=tuple(sorted(set(_FLAG_FORMATS) & flags)),
        sources=_sources(peaks, f"{torch.get_num_threads()} threads"),
        measured=True,
    )


def _cpu_name(flags: frozenset[str]) -> str:
    """The shipped CPU target that asks for the most of these flags, so that a plan says what it was made for."""
    fitting = [t for t in list_targets() if t.kind == "cpu" and flags.issuperset(t.cpu_flags)]
    return max(fitting, key=lambda t: len(t.cpu_flags)).name


def _probe_gpu() -> Target:
    properties = torch.cuda.get_device_properties(0)
    name = str(properties.name)
    known = known_gpu(name, "rocm" if torch.version.hip else "cuda") or _unknown_gpu(name)
    wanted = [f for f in ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e4m3fnuz") if f in known.formats]
    peaks = cached_peaks("cuda", name, wanted, _GPU_SIZE)
    flops = {**known.peaks_flops, **peaks.peaks_flops}
    sources = {**known.sources, **_sources(peaks, "one device")}
    if "fp8_e4m3" in peaks.peaks_flops and "fp8_e5m2" in known.formats:
        # torch multiplies E5M2 only by E4M3, at the same rate
        flops["fp8_e5m2"], sources["peaks_flops.fp8_e5m2"] = flops["fp8_e4m3"], sources["peaks_flops.fp8_e4m3"]
    return replace(
        known,
        title=name,
        peaks_flops=flops,
        bandwidth_bytes_per_s=peaks.bandwidth_bytes_per_s,
        memory_bytes=int(properties.total_memory),
        sources=sources,
        measured=True,
    )


def known_gpu(name: str, kind: str) -> Target | None:
    """The shipped target of a device name as the driver gives it."""
    targets = (t for t in list_targets() if t.kind == kind)
    return next((t for t in targets if any(fnmatch.fnmatchcase(name, glob) for glob in t.device_names)), None)


def _unknown_gpu(name: str) -> Target:
    """What the compute capability tells of a device that no shipped target names."""
    major, minor = torch.cuda.get_device_capability(0)
    hip = bool(torch.version.hip)
    fp8 = ("fp8_e4m3", "fp8_e5m2") if not hip and (major, minor) >= (8, 9) else ()
    wide = ("bf16", "fp16") if hip or major >= 8 else ("fp16",)
    tf32 = ("tf32",) if not hip and major >= 8 else ()
    return Target(
        name=name.lower().replace(" ", "-"),
        title=name,
        kind="rocm" if hip else "cuda",
        formats=(*fp8, *wide, *tf32, "fp32"),
        low_format=wide[0],
        alignment=dict.fromkeys(fp8, 16),
        backends=("transformer_engine", "torchao", "native", "emulated") if fp8 else ("emulated",),
        sources={f"alignment.{f}": "torch._scaled_mm needs dimensions divisible by 16" for f in fp8},
        note=f"no shipped target names this device; compute capability {major}.{minor}",
    )


def _sources(peaks: Peaks, where: str) -> dict[str, str]:
    how = f"measured here with torch {torch.__version__}, {where}"
    return dict.fromkeys([*(f"peaks_flops.{name}" for name in peaks.peaks_flops), "bandwidth_bytes_per_s"], how)


def _matmul(name: str, device: str, size: int) -> Callable[[], torch.Tensor]:
    """One product of two square matrices in a format."""
    dtype = torch.float32 if name == "tf32" else get_format(name).torch_dtype
    if dtype is None:
        raise NotImplementedError("torch has no dtype for it")
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    if name in ("fp32", "tf32") and device != "cpu":
        return lambda: _matmul_fp32(left, right, "tf32" if name == "tf32" else "ieee")
    if not name.startswith("fp8"):
        return lambda: left @ right
    one = torch.ones((), device=device)
    # the second operand of an fp8 product must be column-major
    return lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _matmul_fp32(left: torch.Tensor, right: torch.Tensor, precision: str) -> torch.Tensor:
    """A product in true fp32 or in TF32; the user's choice is put back."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        return left @ right
    finally:
        settings.fp32_precision = before


def _best_seconds(runs: Mapping[str, Callable[[], torch.Tensor]], device: str) -> dict[str, float]:
    """Shortest call of each, taken in turns, so that a busy moment of the machine hits them all alike."""
    best = dict.fromkeys(runs, float("inf"))
    deadline = time.perf_counter() + _SECONDS_EACH * len(runs)
    for _ in range(_MAX_ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            _finish(run(), device)
            best[name] = min(best[name], time.perf_counter() - start)
        if time.perf_counter() >= deadline:
            break
    return best


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
    good = "fp32" in flops and all(0 < v < 1e18 for v in (*flops.values(), peaks.bandwidth_bytes_per_s))
    return peaks if good else None


def _system_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _platform_name() -> str:
    import platform

    return platform.processor() or platform.machine() or "unknown CPU"
