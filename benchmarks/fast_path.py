"""What one forward costs: fp32, ``torch.autocast``, the mode of a converted model, and its captured graph.

    python benchmarks/fast_path.py              # two minutes on one core; writes benchmarks/results/fast_path.json
    python benchmarks/fast_path.py --rounds 50

All ways take turns in one process, in random order within each round, with ``torch.autocast`` twice: the second is the
control. Differences are paired within rounds. Times are the calling thread's own processor time, which neighbours on a
shared machine prolong less than they do the wall clock's. The goal for the graph is at most autocast + 100 µs a call.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import autoprec
from autoprec.atomic import write_text
from autoprec.frames.swap import FAST
from autoprec.lower.fast import path
from autoprec.measure import describe_environment
from autoprec.measure.timing import median_interval
from autoprec.tasks.byte_gpt import ByteGPT

RESULT = Path(__file__).parent / "results" / "fast_path.json"
TARGET = "cpu-avx512-bf16"
WAYS = ("fp32", "autocast", "control", "mode", "graph")
#: name → width, layers, context, batch
MODELS = {"tiny": (64, 2, 64, 2), "mid": (256, 2, 128, 2)}


def build(size: tuple[int, int, int, int]) -> ByteGPT:
    torch.manual_seed(0)
    width, layers, context, _ = size
    return ByteGPT(width=width, layers=layers, heads=width // 64, context=context)


def converted(size: tuple[int, int, int, int], mode: str, tokens: torch.Tensor) -> tuple[Any, Any, str]:
    """The model in the mode, the model on its graph, and what the graph's own trial measured."""
    in_mode, on_graph = (autoprec.convert(build(size), TARGET, mode=mode) for _ in range(2))  # type: ignore[arg-type]
    del vars(in_mode)[FAST]
    while vars(on_graph)[FAST].stage in ("watching", "measuring"):
        on_graph(tokens)
    if vars(on_graph)[FAST].stage != "graph":
        raise SystemExit(f"no graph: {vars(on_graph)[FAST].note}")
    return in_mode, on_graph, vars(on_graph)[FAST].note


def measure(calls: dict[str, Callable[[], object]], rounds: int, repeat: int) -> dict[str, np.ndarray]:
    """Way → µs of one call, in each round."""
    times = {way: np.empty(rounds) for way in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    for k in range(-3, rounds):  # three rounds to warm up
        shuffle(order)
        for way in order:
            start = time.thread_time()
            for _ in range(repeat):
                calls[way]()
            if k >= 0:
                times[way][k] = (time.thread_time() - start) / repeat * 1e6
    return times


def run(name: str, mode: str, rounds: int) -> dict[str, Any]:
    size = MODELS[name]
    tokens = torch.randint(0, 256, (size[3], size[2]))
    with torch.set_grad_enabled(mode == "training"):
        plain, (in_mode, on_graph, note) = build(size), converted(size, mode, tokens)

        def autocast() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                plain(tokens)

        times = measure(
            {
                "fp32": lambda: plain(tokens),
                "autocast": autocast,
                "control": autocast,
                "mode": lambda: in_mode(tokens),
                "graph": lambda: on_graph(tokens),
            },
            rounds,
            repeat=10 if name == "tiny" else 3,
        )
    row: dict[str, Any] = {"model": name, "forward": mode, "rounds": rounds, "trial": note}
    row["us"] = {way: round(float(np.quantile(times[way], 0.25)), 1) for way in WAYS}
    for way in ("control", "mode", "graph"):
        row[f"{way}_minus_autocast_us"] = [round(v, 1) for v in median_interval(times[way] - times["autocast"])]
    row["graph_over_mode"] = [round(v, 3) for v in median_interval(times["graph"] / times["mode"])]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # The graph at once and whatever it gains: its gain is what is measured here.
    path.CAPTURE_AFTER_S, path.LEAST_GAIN, path.LONGEST_FORWARD_S = 1e-9, -math.inf, math.inf
    rows = []
    for name in MODELS:
        for mode in ("training", "inference"):
            rows.append(row := run(name, mode, options.rounds))
            print(f"{name:5} {mode:10} {row['us']}  graph - autocast {row['graph_minus_autocast_us']} µs")
    environment = describe_environment().to_json()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    result = {
        "date": date,
        "environment": environment,
        "target": TARGET,
        "us_is": "thread time, lower quartile of the rounds",
    }
    RESULT.parent.mkdir(exist_ok=True)
    write_text(RESULT, json.dumps({**result, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
