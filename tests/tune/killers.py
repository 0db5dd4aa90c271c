"""A tiny task that ends or spoils its process, in the way that a file says, where its model runs in bf16.

The file ``deed`` is in the folder that ``KILLERS_FOLDER`` names.  Before the deed, ``always`` does it in fp32 too, and
``rank1`` does it on that rank only.
"""

import ctypes
import math
import os
import signal
import sys
import time
from pathlib import Path

import tiny
import torch
from torch import nn


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _loop():
    while True:
        pass


def _leak():
    torch.set_default_dtype(torch.float64)
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()


def _read_nothing():
    ctypes.string_at(0)


def _say():
    print("said by the trial")
    print("warned by the trial", file=sys.stderr)
    _die()


def _die_once():
    if not _path("once").exists():
        _path("once").touch()
        _die()


def _linger():
    _path("pid").write_text(str(os.getpid()))
    time.sleep(1000)


def _raise():
    raise ValueError("no such label: 7")


DEEDS = {
    "die": _die,
    "die_once": _die_once,
    "exit": lambda: sys.exit(4),
    "loop": _loop,
    "want_memory": lambda: torch.empty(2**50),
    "raise": _raise,
    "leak": _leak,
    "read_nothing": _read_nothing,
    "say": _say,
    "nap": lambda: time.sleep(0.15),
    "linger": _linger,
}


def _path(name):
    return Path(os.environ["KILLERS_FOLDER"], name)


def _asked(low):
    *when, deed = _path("deed").read_text().split() or [""]
    ranks = [word for word in when if word.startswith("rank")]
    is_here = not ranks or f"rank{os.environ.get('RANK')}" in ranks
    return deed if is_here and (low or "always" in when) else ""


class Doer(tiny.Planted):
    def forward(self, x):
        deed = _asked(self.wide(x).dtype != torch.float32)
        if deed in DEEDS:
            DEEDS[deed]()
        y = super().forward(nn.functional.dropout(x, 0.5) if deed == "drop" else x)
        return y * math.nan if deed == "poison" else y


def _build_model(seed):
    torch.manual_seed(seed)
    return Doer(0.0, 0.0, 0.0, 1.0)


task = tiny.make(build_model=_build_model)
