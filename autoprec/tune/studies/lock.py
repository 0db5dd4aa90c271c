"""One device is timed by one process at a time.

Training on a device spoils a neighbour's timing there, and timings spoil each other.  So each training step holds the
device's lock *shared*, and a timing holds it *alone*: while one worker times, the others on that device pause between
two steps.  A timing that waits keeps new steps from starting, so that it waits for one step of each neighbour at most.

The locks are ``flock`` locks on files in the temporary folder: the kernel releases them when their holder dies.  They
reach as far as that folder: processes in containers with folders of their own don't see each other.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from autoprec.errors import UsageError

if TYPE_CHECKING:
    import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

#: Whether this system has such locks.  Without them :func:`device_lock` does nothing, and one worker is the limit.
HAS_LOCKS = fcntl is not None

_POLL_S = 0.05

_held = threading.local()


@contextmanager
def device_lock(device: str | torch.device, *, shared: bool = False) -> Iterator[None]:
    """Hold a device: alone for a timing, ``shared`` for a training step.

    Steps inside a timing take nothing further.

    Args:
        device: such as ``cuda:0``; all of a machine's cores are one device.
        shared: allow other shared holders.

    Raises:
        UsageError: a timing was asked for inside a training step, which would wait for itself.
    """
    path = lock_path(device)
    holds: dict[Path, bool] = _held.__dict__.setdefault("locks", {})
    if path in holds or not HAS_LOCKS:
        if holds.get(path) and not shared:
            raise UsageError(f"a timing on {device} was asked for inside a training step there, which holds it shared")
        yield
        return
    # steps pass the gate only to enter; a timing keeps it while it waits, so that steps can't starve it
    gate = hold(path.with_suffix(".gate"))
    try:
        descriptor = hold(path, shared=shared)
    finally:
        drop(gate)
    holds[path] = shared
    try:
        yield
    finally:
        del holds[path]
        drop(descriptor)


@cache
def lock_path(device: str | torch.device) -> Path:
    """The file that stands for a device of this host, whatever number it has in this process."""
    kind, _, index = str(device).partition(":")
    name = kind if kind == "cpu" else f"{kind}-{_identity(kind, int(index or 0))}"
    return lock_folder() / f"{socket.gethostname()}-{name}.lock"


def lock_folder() -> Path:
    """Of this host's lock files, all users'."""
    return Path(tempfile.gettempdir()) / "autoprec-locks"


def _identity(kind: str, index: int) -> str:
    """A device's own name: its index depends on ``CUDA_VISIBLE_DEVICES``."""
    if kind == "cuda":
        import torch

        # absent in builds of torch that don't know it
        unique = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if unique is not None:
            return str(unique)
    return str(index)


@contextmanager
def in_turn(name: str, longest_s: float) -> Iterator[None]:
    """Let one process of this host at a time do something, as a courtesy: after ``longest_s`` nobody waits longer."""
    held = None
    deadline = time.monotonic() + longest_s
    while HAS_LOCKS and held is None and time.monotonic() < deadline:
        try:
            held = hold(lock_folder() / f"{name}.lock", wait=False)
        except BlockingIOError:
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        if held is not None:
            drop(held)


def hold(path: Path, *, shared: bool = False, wait: bool = True) -> int:
    """Hold a file's lock, and make the file if it isn't there; :func:`drop` takes what this returns.

    Raises:
        BlockingIOError: ``wait`` is False and another process holds it.
    """
    descriptor = _open(path)
    if fcntl is not None:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def drop(descriptor: int) -> None:
    """Let others have the lock, even where a forked child still has the descriptor."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _open(path: Path) -> int:
    # never through a link, and read only, which is enough for a lock and works on other users' files
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)
    while True:
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            if not path.parent.is_dir():
                path.parent.mkdir(exist_ok=True)
                path.parent.chmod(0o1777)  # every user puts files there
            try:
                return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue
