"""What a trial may leave behind in its process: changed settings of torch, a broken device, memory.

The same settings are what a new worker process needs to compute as its parent does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

#: Bytes and share that a process may grow beyond what it held after its first trial.
_SLACK_BYTES, _SLACK_SHARE = {"cpu": 1 << 30, "accelerator": 1 << 28}, 0.5

#: The value of a setting that can't be read: the old and the new way to set TF32 were mixed.
_UNREADABLE = "unreadable"


def _backend(path: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Reader and writer of one flag under ``torch.backends``."""
    *folders, name = path.split(".")
    owner: Any = torch.backends
    for folder in folders:
        owner = getattr(owner, folder)
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _autocast(device_type: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    def write(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device_type, value[0])
        torch.set_autocast_dtype(device_type, value[1])

    return lambda: (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)), write


_PRECISIONS = (
    "fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
)
_FLAGS = (
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
)

#: Setting → how it is read and written; what has no writer is only looked at.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, torch.set_default_device),
    "the grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "inference mode": (torch.is_inference_mode_enabled, None),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "flushing of denormals": (lambda: float(torch.tensor(1e-40, device="cpu") * 1.0) == 0.0, torch.set_flush_denormal),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "autocast on the CPU": _autocast("cpu"),
    "autocast on CUDA": _autocast("cuda"),
    "active torch modes": (
        lambda: (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        None,
    ),
    "the float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **{f"torch.backends.{path}": _backend(path) for path in (*_PRECISIONS, *_FLAGS)},
}


def read_settings() -> dict[str, Any]:
    """This process's settings of torch that change what a model computes, or how fast."""
    return {name: _read(read) for name, (read, _) in _SETTINGS.items()}


def apply_settings(settings: dict[str, Any]) -> None:
    """Make this process compute as the one that :func:`read_settings` was called in.

    Only what differs is written: writing a default may switch something on.  Some writes change other settings too,
    which come later here.
    """
    for name, (read, write) in _SETTINGS.items():
        if write is not None and settings[name] not in (_UNREADABLE, _read(read)):
            write(settings[name])


def changed_settings(before: dict[str, Any]) -> list[str]:
    """Names of the settings that aren't what they were."""
    now = read_settings()
    return [name for name in before if now[name] != before[name]]


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return _UNREADABLE


def is_broken(device: torch.device) -> str:
    """Why a device doesn't compute any more; empty if it does.

    After an illegal access every later call in the process fails, whichever model makes it.
    """
    if device.type == "cpu":
        return ""
    try:
        ones = torch.ones(2, device=device)
        torch.accelerator.synchronize(device)
        float(ones.sum())
    except Exception as exc:  # whatever the device's library raises
        return f"{device} no longer computes ({str(exc).splitlines()[0][:200]})"
    return ""


class MemoryWatch:
    """Compares the memory of this process with what it held after its first trial.

    That one filled what stays on purpose: batches, the fp32 model, the libraries' workspaces.

    Args:
        device: of the trials.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: dict[str, int] = {}

    def grown(self) -> str:
        """How far memory has grown beyond reason; empty if it hasn't."""
        for kind, num_bytes in self._held():
            first = self._first.setdefault(kind, num_bytes)
            growth = num_bytes - first
            if growth > max(_SLACK_BYTES[kind], _SLACK_SHARE * first):
                where = "memory" if kind == "cpu" else f"memory of {self._device}"
                return f"{growth / 2**20:.0f} MiB of {where} more than after its first trial"
        return ""

    def _held(self) -> Iterator[tuple[str, int]]:
        statm = Path("/proc/self/statm")
        if statm.is_file():  # elsewhere the standard library knows the peak alone
            yield "cpu", int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if self._device.type == "cuda":
            yield "accelerator", torch.cuda.memory_allocated(self._device)
