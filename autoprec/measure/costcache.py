"""Measured costs kept on disk, so that a shape is measured once a device.

One JSON file holds what belongs to one device, number of threads and set of versions.  Costs are kept in *yardsticks*:
multiples of one fixed matrix product that was timed in the same rounds.  So they don't move with the machine's load,
and costs of different days can be added up.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from autoprec import atomic
from autoprec.errors import UsageError
from autoprec.lower.switches import is_set
from autoprec.measure.environment import describe_environment
from autoprec.probe import cache_folder

log = logging.getLogger(__name__)

_SCHEMA = 1
#: Seconds to wait for another process that writes the same file.
_LOCK_S = 10.0
#: Libraries whose kernels a plan may run.
_LIBRARIES = ("torchao", "transformer-engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One measured cost.

    Args:
        value: in yardsticks; :data:`YARDSTICK` itself is in seconds.
        low, high: its 95% interval.
        rounds: readings behind it.
        date: UTC, ISO 8601.
        label: what was measured, for a reader.
    """

    value: float
    low: float
    high: float
    rounds: int
    date: str
    label: str = ""

    def __post_init__(self) -> None:
        # a file may hold anything
        numbers = (self.value, self.low, self.high)
        if not all(isinstance(v, float) and 0 < v < math.inf for v in numbers) or type(self.rounds) is not int:
            raise UsageError(f"a reading of {numbers} in {self.rounds!r} rounds; allowed: positive finite numbers")


#: Name of the reading of the yardstick itself, in seconds.
YARDSTICK = "yardstick"


class CostCache:
    """The readings in one file.

    Args:
        path: of the file; it need not exist.
        identity: what the readings belong to; a file of another identity is ignored.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self.identity = path, dict(identity)
        self._readings = self._read()
        self._new: dict[str, Reading] = {}

    @classmethod
    def of_device(cls, device: torch.device | str = "cpu") -> CostCache:
        """The cache of a device of this machine with what is installed, in :func:`autoprec.probe.cache_folder`."""
        identity = identity_of(device)
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        return cls(cache_folder() / f"costs-{digest}.json", identity)

    def __len__(self) -> int:
        return len(self._readings)

    def get(self, key: str) -> Reading | None:
        """The reading of that key, this process's own or one that was on disk."""
        return self._readings.get(key)

    def put(self, key: str, reading: Reading) -> None:
        """Adds a reading; :meth:`save` writes it."""
        self._readings[key] = self._new[key] = reading

    def save(self) -> None:
        """Writes the new readings beside those that other processes wrote meanwhile.

        A file that can't be written is said in the log: its costs are measured again next time.
        """
        from filelock import FileLock, Timeout  # torch needs it too

        if not self._new:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=_LOCK_S):
                merged = self._read() | self._new
                content = {
                    "schema": _SCHEMA,
                    "identity": self.identity,
                    "readings": {key: asdict(merged[key]) for key in sorted(merged)},
                }
                atomic.write_text(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        except (OSError, Timeout) as error:
            log.warning("measured costs can't be kept in %s (%s): they are measured again next time", self.path, error)
        else:
            self._new.clear()

    def _read(self) -> dict[str, Reading]:
        try:
            data = json.loads(self.path.read_text("utf-8"))
            if data["schema"] != _SCHEMA or data["identity"] != self.identity:
                return {}
            return {str(key): _reading(values) for key, values in data["readings"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning(
                "%s can't be used (%s: %s): its costs are measured again", self.path, type(error).__name__, error
            )
            return {}


def identity_of(device: torch.device | str) -> dict[str, Any]:
    """What a cost depends on beside the op: the device, the threads, the versions, and torch's own precision."""
    from autoprec import __version__

    environment = describe_environment(device)
    return {
        "autoprec": __version__,
        "torch": environment.torch,
        "cuda": torch.version.cuda or torch.version.hip,
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name))},
        "device": environment.device,
        "device_kind": environment.device_kind,
        "cpu": environment.cpu,
        "threads": environment.threads,
        # or else what the process lets torch make of it
        "fp32_as_it_is": {op: is_set(environment.device_kind, op, "ieee") for op in ("matmul", "conv2d", "lstm")},
    }


def _reading(values: dict[str, Any]) -> Reading:
    return Reading(**{field.name: values[field.name] for field in dataclasses.fields(Reading)})


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
