"""Real text that every Python carries: the source of its own standard library."""

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from autoprec.errors import TaskError

#: Enough that a study never reads a window twice by chance often, small enough to read in a few milliseconds.
MAX_BYTES = 4 * 2**20
_MIN_BYTES = 2**18


@lru_cache(maxsize=1)
def stdlib_text() -> Tensor:
    """The top-level modules' source in order of their names, as bytes, shape ``(num_bytes,)`` uint8."""
    folder = Path(os.__file__).parent
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:MAX_BYTES]
    if len(text) < _MIN_BYTES:
        raise TaskError(
            f"the standard library in {folder} has only {len(text)} bytes of source, and the built-in text tasks need "
            f"{_MIN_BYTES}; use a Python that ships its .py files, or name a task of your own"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def text_identity() -> str:
    """Names the text by its content: another Python version has another one."""
    return "stdlib-" + hashlib.sha256(stdlib_text().numpy().tobytes()).hexdigest()[:12]


def text_windows(seed: int, *, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of the text at random places, without end.

    Yields:
        ``(input_BT, target_BT)`` int64; the target is the input moved on by one byte.
    """
    text = stdlib_text()
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(text) - length - 1, (batch, 1), generator=generator)
        window = text[starts + offsets].long()
        yield window[:, :-1], window[:, 1:]
