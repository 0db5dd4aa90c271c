"""A study's journal: a file that several processes append to, whole lines only.

Optuna's :class:`~optuna.storages.journal.JournalFileBackend` leaves half a line behind when its process is killed in a
write or the disk is full, and the next line, appended to it, makes the whole journal unreadable.  Here a writer first
cuts such a rest off.  Its lock, too, would stay behind for 30 seconds; a local file system's own lock dies with its
holder.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from autoprec.tune.studies.lock import HAS_LOCKS, drop, hold

#: Network file systems, on which the kernel's lock may hold on one host only; Optuna's lock is made for them.
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p")
_MOUNTS = Path("/proc/self/mounts")
_BLOCK_BYTES = 1 << 16
#: Of every line.
_START = b'{"op_code":'


def open_journal(path: Path) -> JournalStorage:
    """The journal at ``path``, made if it isn't there.

    Raises:
        OSError: the folder is missing or can't be written to.
        ValueError: the file isn't a journal, or is damaged.
    """
    if path.exists():
        with path.open("rb") as file:
            start = file.read(len(_START))
        # never cut a file that isn't ours
        if start != _START[: len(start)]:
            raise ValueError(f"{str(path)!r} isn't a journal of Optuna's: it starts with {start!r}")
    return JournalStorage(_Backend(path))


class _Backend(JournalFileBackend):
    """Optuna's file, appended to so that it holds whole lines or none of what was to be written."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        is_local = HAS_LOCKS and not _is_network(path)
        self._own_lock = _KernelLock(path) if is_local else JournalFileOpenLock(str(path))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self._own_lock.acquire()
        try:
            with Path(self._file_path).open("r+b", buffering=0) as file:
                end = _end_of_last_line(file)
                if end < file.seek(0, os.SEEK_END):
                    file.truncate(end)
                file.seek(end)
                try:
                    _write(file, text.encode())
                except OSError:
                    file.truncate(end)
                    raise
        finally:
            self._own_lock.release()


def _write(file: Any, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    os.fsync(file.fileno())


def _end_of_last_line(file: BinaryIO) -> int:
    """Bytes up to and with the last line end."""
    end = file.seek(0, os.SEEK_END)
    block = 1  # the last byte is one, unless a process was killed in a write
    while end > 0:
        start = max(0, end - block)
        block = _BLOCK_BYTES
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


class _KernelLock:
    """A lock of the kernel's, on a file beside the journal; it ends with its holder."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".flock")  # Optuna's own is a file named ".lock"
        self._descriptor = -1

    def acquire(self) -> None:
        self._descriptor = hold(self._path)

    def release(self) -> None:
        drop(self._descriptor)


def _is_network(path: Path) -> bool:
    """Whether the file lies, or will lie, on another host's disk; unknown counts as no."""
    try:
        mounts = [line.split(" ") for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    folder = str(path.resolve().parent) + "/"
    points = [(point.rstrip("/") + "/", kind) for _, point, kind, *_ in mounts]
    inside = [(len(point), kind) for point, kind in points if folder.startswith(point)]
    return bool(inside) and max(inside)[1].split(".")[0] in _NETWORK


def is_full(exc: OSError) -> bool:
    """Whether there was no room left to write."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
