"""What the mode costs a call: a converted GPT against plain eager and ``torch.autocast``, without gradients.

    python benchmarks/overhead.py                 # a minute on one core; writes benchmarks/results/overhead.json

The tiny model computes next to nothing, so that its times are Python's.  ``frames`` runs the mode under an empty plan:
no casts.  ``mode`` is the plan of a target with bf16; ``mode, inference`` keeps cast weights.  Readings of all take
turns in one process; ``eager again`` is the control.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import autoprec
from autoprec.atomic import write_text
from autoprec.frames.swap import FAST
from autoprec.measure import describe_environment
from autoprec.measure.timing import median_interval
from autoprec.plan import Plan

RESULT = Path(__file__).parent / "results" / "overhead.json"
#: name → width, heads, blocks, tokens of one sequence.
SIZES = {"tiny": (32, 2, 2, 16), "mid": (256, 4, 6, 64)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, heads: int, blocks: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(context, width) / 10)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))


class Count(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def build(size: str) -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    width, heads, blocks, context = SIZES[size]
    return GPT(width, heads, blocks, context).eval(), torch.randint(0, 256, (1, context))


def in_mode(model: nn.Module, **options: Any) -> nn.Module:
    """Converted, without the graph that may run in place of the mode."""
    model = autoprec.convert(model, **options)
    vars(model).pop(FAST, None)
    return model


def methods(size: str) -> dict[str, Callable[[], object]]:
    """Name → one forward; ``eager again`` is the control."""
    plain, tokens = build(size)
    empty = in_mode(build(size)[0], plan=Plan(rules=()))
    mode = in_mode(build(size)[0], target="a100")
    kept = in_mode(build(size)[0], target="a100", mode="inference")
    bf16 = build(size)[0].bfloat16()

    def autocast() -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return plain(tokens)

    return {
        "eager fp32": lambda: plain(tokens),
        "eager again": lambda: plain(tokens),
        "torch.autocast": autocast,
        "model.bfloat16()": lambda: bf16(tokens),
        "frames": lambda: empty(tokens),
        "mode": lambda: mode(tokens),
        "mode, inference": lambda: kept(tokens),
    }


def read(call: Callable[[], object], calls: int) -> float:
    """Seconds of processor time of one call: a neighbour's time isn't the mode's."""
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls


def readings(steps: dict[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, np.ndarray]:
    """Name → seconds a call in each round; the steps take turns, in random order within a round."""
    calls = {}
    for name, step in steps.items():
        step(), step()
        calls[name] = max(1, round(seconds / read(step, 2)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(read(steps[name], calls[name]))
    return {name: np.array(values) for name, values in times.items()}


def row(times: np.ndarray, eager: np.ndarray, autocast: np.ndarray, calls: int) -> dict[str, Any]:
    """Medians over the rounds with 95% intervals, each round against its own eager and autocast readings."""
    quantities = {
        "us": times * 1e6,
        "us_a_call_above_eager": (times - eager) * 1e6 / calls,
        "us_above_autocast": (times - autocast) * 1e6,
        "times_eager": times / eager,
        "times_autocast": times / autocast,
    }
    return {
        name: dict(zip(("value", "low", "high"), median_interval(v), strict=True)) for name, v in quantities.items()
    }


def line(name: str, row: dict[str, Any]) -> str:
    cells = [f"{row[key]['value']:{width}.{digits}f}" for key, width, digits in COLUMNS]
    return f"{name:18}{''.join(cells)}   {row['times_autocast']['low']:.3f} … {row['times_autocast']['high']:.3f}"


COLUMNS = (("us", 10, 0), ("us_a_call_above_eager", 12, 2), ("us_above_autocast", 15, 0), ("times_autocast", 13, 3))
HEAD = f"{'':18}{'µs':>10}{'µs a call':>12}{'µs − autocast':>15}{'× autocast':>13}   interval"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.02, help="length of one reading")
    parser.add_argument("--only", choices=SIZES)
    parser.add_argument("--no-write", action="store_true", help="leave the results file alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {
        "environment": describe_environment().to_json(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "clock": "processor time of the calling thread",
        "rounds": options.rounds,
        "sizes": {},
    }
    for size in [options.only] if options.only else SIZES:
        steps = methods(size)
        with torch.no_grad(), Count() as count:
            steps["eager fp32"]()
        with torch.no_grad():
            times = readings(steps, options.rounds, options.seconds)
        rows = {
            name: row(values, times["eager fp32"], times["torch.autocast"], count.calls)
            for name, values in times.items()
        }
        modules = sum(1 for _ in build(size)[0].modules())
        print(f"{size} GPT: {count.calls} calls, {modules} modules", HEAD, sep="\n")
        print("\n".join(line(name, values) for name, values in rows.items()), end="\n\n")
        document["sizes"][size] = {"calls": count.calls, "modules": modules, "methods": rows}
    if not options.no_write:
        write_text(RESULT, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
