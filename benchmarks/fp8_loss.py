"""Loss of emulated low-precision recipes against fp32, paired from one checkpoint of the built-in GPT.

    python benchmarks/fp8_loss.py

Each run starts from the same weights and sees the same batches; its gap is the mean difference of the training loss
over all steps, as a share of fp32's.  Head, first and last block run in bf16, the rest as named; the naive conversions,
which are here to be told from the good ones, convert every linear layer.

Writes ``benchmarks/results/fp8_loss.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from autoprec.backends import LinearSpec, get_backend
from autoprec.measure import describe_environment
from autoprec.plan import Formats
from autoprec.recipes import CurrentRecipe, NVFP4Recipe
from autoprec.tasks import Task
from autoprec.tasks.byte_gpt import make_task

RESULT = Path(__file__).parent / "results" / "fp8_loss.json"
BF16 = LinearSpec(formats=Formats.all("bf16"))
HYBRID = LinearSpec(
    formats=Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2"), recipe=CurrentRecipe()
)
SPECS = {
    "bf16": BF16,
    "fp8 current, HYBRID": HYBRID,
    "fp8 current, HYBRID, everywhere": HYBRID,
    "fp8 e4m3, unscaled": LinearSpec(formats=Formats.all("fp8_e4m3")),
    "nvfp4": LinearSpec(formats=Formats.all("nvfp4"), recipe=NVFP4Recipe()),
    "nvfp4, 1-D, round to nearest": LinearSpec(
        formats=Formats.all("nvfp4"), recipe=NVFP4Recipe(weight_2d=False, stochastic_rounding=False, hadamard=False)
    ),
}


#: Converted as a whole, head and first and last block included: naive conversions, and good recipes to compare.
EVERYWHERE = ("fp8 e4m3, unscaled", "nvfp4, 1-D, round to nearest", "fp8 current, HYBRID, everywhere")


def emulate(model: nn.Module, spec: LinearSpec, everywhere: bool = False) -> None:
    """Every linear layer runs as ``spec`` says, by default in bf16 in the head and the first and last block."""
    last = max(int(name.split(".")[1]) for name, _ in model.named_modules() if name.startswith("blocks."))
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            inner = name.startswith("blocks.") and 0 < int(name.split(".")[1]) < last
            layer.forward = forward(layer, spec if inner or everywhere else BF16)


def forward(layer: nn.Linear, spec: LinearSpec) -> Callable[[Tensor], Tensor]:
    backend = get_backend("emulated")
    return lambda x: backend.linear(x, layer.weight, layer.bias, spec)


def train(task: Task, model: nn.Module, state: dict | None, data_seed: int, steps: int) -> tuple[list[float], dict]:
    """Losses of ``steps`` steps, and the optimizer's state after them."""
    assert task.optimizer is not None
    torch.manual_seed(data_seed)  # of stochastic rounding
    optimizer = task.optimizer(model.parameters())
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    losses = []
    for _, batch in zip(range(steps), task.stream(data_seed), strict=False):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer.state_dict()


def summarise(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean gap of each recipe over the data seeds with its 95% interval (Student's t), in per cent."""
    found = {}
    for name in SPECS:
        gaps = [row["gap_pct"] for row in rows if row["recipe"] == name]
        mean = statistics.fmean(gaps)
        half = float(stdtrit(len(gaps) - 1, 0.975)) * statistics.stdev(gaps) / math.sqrt(len(gaps))
        found[name] = {"gap_pct": mean, "low": mean - half, "high": mean + half}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warmup", type=int, default=2200, help="fp32 steps before the checkpoint")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    started = time.perf_counter()
    task = make_task(context=128)
    checkpoint = task.build_model(0)
    warmup, state = train(task, checkpoint, None, 0, options.warmup)
    rows = []
    for seed in range(1, options.seeds + 1):
        reference, _ = train(task, copy.deepcopy(checkpoint), state, seed, options.steps)
        for name, spec in SPECS.items():
            model = copy.deepcopy(checkpoint)
            emulate(model, spec, everywhere=name in EVERYWHERE)
            losses, _ = train(task, model, state, seed, options.steps)
            gap = statistics.fmean(a - b for a, b in zip(losses, reference, strict=True)) / statistics.fmean(reference)
            rows.append({"recipe": name, "seed": seed, "gap_pct": 100 * gap, "last_loss": losses[-1]})
            print(f"seed {seed}  {name:32} gap {100 * gap:+.3f}%", flush=True)
    result = {
        "environment": describe_environment("cpu").to_json(),
        "task": task.data,
        "warmup_steps": options.warmup,
        "checkpoint_loss": statistics.fmean(warmup[-20:]),
        "steps": options.steps,
        "wall_s": round(time.perf_counter() - started, 1),
        "everywhere": list(EVERYWHERE),
        "summary": summarise(rows),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
