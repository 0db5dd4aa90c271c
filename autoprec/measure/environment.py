"""The machine and the versions that a measurement belongs to."""

import os
import platform
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where something was measured.

    Args:
        device: name of the accelerator, or of the processor.
        device_kind: ``cpu``, ``cuda``, … as torch names it.
        cpu: model of the processor; ``unknown`` where the system doesn't say.
        cores: processors this process may run on.
        threads: threads torch computes with.
        torch, python, system: versions.
    """

    device: str
    device_kind: str
    cpu: str
    cores: int
    threads: int
    torch: str
    python: str
    system: str

    def to_json(self) -> dict[str, str | int]:
        return asdict(self)


def describe_environment(device: torch.device | str = "cpu") -> Environment:
    """The environment of measurements on ``device``."""
    device = torch.device(device)
    return Environment(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model(),
        device_kind=device.type,
        cpu=_cpu_model(),
        cores=_usable_cores(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
    )


def _usable_cores() -> int:
    """A container or ``taskset`` may leave fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"
