"""Does a tuned loss scaler earn its place?  An fp16 task with planted underflow and overflow, against torch's default.

A byte-level model of the standard library's source. Its gradients really pass through fp16, at two places:

* the branch's are 2^20 times smaller than in fp32: at a scale of 2^6 95% of them underflow to 0, at 2^12 half;
* the trunk's are 2^22 times larger at first, falling to 2^6 times within 60 steps: at first a scale above about 2^6
  overflows, later one above about 2^17.

Without fp16 both places are the identity, so that the same model in fp32 is the reference. torch's default falls
through the early overflows, and its growth interval of 2000 never brings it back. Settings are tuned on one seed and
judged on three others.

    python benchmarks/scaler.py            # a minute on one core; writes benchmarks/results/scaler.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autoprec.atomic import write_text
from autoprec.plan import ScalerSettings
from autoprec.scaler import BoundedGradScaler
from autoprec.train import Stepper

CONTEXT, WIDTH, BATCH, STEPS = 8, 48, 128, 400
UNDERFLOW_GAIN = 2.0**-20
TUNING_SEED, SEEDS = 100, (0, 1, 2)
RESULT = Path(__file__).parent / "results" / "scaler.json"
DEFAULT = ScalerSettings(enabled=True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Loss of held-out bytes, in nats per byte, and optimizer steps that were skipped."""

    loss: float
    skipped: int


class HalfGradient(torch.autograd.Function):
    """Identity whose gradient, ``gain`` times, is stored in fp16: it rounds, underflows and overflows as fp16 does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: float) -> torch.Tensor:
        ctx.gain = gain
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grads[0] * ctx.gain).half().float() / ctx.gain, None


class ByteModel(nn.Module):
    """The next byte from the last one (the trunk) and from the seven before it (the branch)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH // 2)
        self.trunk = nn.Linear(WIDTH // 2, WIDTH)
        self.branch = nn.Linear((CONTEXT - 1) * WIDTH // 2, WIDTH)
        self.head = nn.Linear(2 * WIDTH, 256)

    def forward(self, x: torch.Tensor, overflow_gain: float | None) -> torch.Tensor:
        """Logits, (batch, 256), of bytes (batch, CONTEXT); without a gain the gradients stay in fp32."""
        near, far = self.embed(x[:, -1:]).flatten(1), self.embed(x[:, :-1]).flatten(1)
        near, far = self.trunk(near), self.branch(far)
        if overflow_gain is not None:
            near = HalfGradient.apply(near, overflow_gain)
            far = HalfGradient.apply(far, UNDERFLOW_GAIN)
        return self.head(torch.cat([near, far], -1).tanh())


def overflow_gain(step: int) -> float:
    """2^22 at the start, 2^6 from step 60 on."""
    return 2.0 ** (6 + 16 * max(0.0, 1 - step / 60))


def corpus() -> torch.Tensor:
    """Bytes of some modules of the standard library, about 0.5 MB."""
    names = [
        "argparse",
        "ast",
        "datetime",
        "decimal",
        "doctest",
        "inspect",
        "pickle",
        "subprocess",
        "tarfile",
        "typing",
    ]
    folder = Path(argparse.__file__).parent
    text = b"".join(path.read_bytes() for name in names if (path := folder / f"{name}.py").exists())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(settings: ScalerSettings | None, seed: int) -> Run:
    """Train from scratch; None trains in fp32.  The loss is that of held-out bytes."""
    text = corpus()
    windows = text.unfold(0, CONTEXT + 1, 1)
    split = len(windows) * 9 // 10
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = BoundedGradScaler(settings, device="cpu") if settings else None
    with Stepper(model, optimizer, scaler=scaler) as step:
        for index in range(STEPS):
            batch = windows[torch.randint(split, (BATCH,), generator=generator)]
            logits = model(batch[:, :-1], overflow_gain(index) if settings else None)
            step(F.cross_entropy(logits, batch[:, -1]))
    held_out = windows[split::7]
    with torch.no_grad():
        loss = F.cross_entropy(model(held_out[:, :-1], None), held_out[:, -1]).item()
    return Run(loss=loss, skipped=step.monitor.skipped)


def tune(seed: int) -> tuple[ScalerSettings, int]:
    """Of the settings within 0.5% of the lowest loss, those with the fewest skipped steps; and how many were tried."""
    grid = itertools.product([2, 6, 10, 16], [8, 16, 50, 200, 2000], [12, 16, 20])
    tried = [
        ScalerSettings(enabled=True, init_scale=2.0**init, growth_interval=interval, max_scale=2.0**top)
        for init, interval, top in grid
        if init <= top
    ]
    runs = [(settings, train(settings, seed)) for settings in tried]
    good = min(run.loss for _, run in runs) * 1.005
    best, _ = min((r for r in runs if r[1].loss <= good), key=lambda r: (r[1].skipped, r[1].loss))
    return best, len(runs)


def main() -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    tuned, num_trials = tune(TUNING_SEED)
    rows = [
        {"seed": seed, "name": name, **asdict(train(settings, seed))}
        for seed in SEEDS
        for name, settings in {"fp32": None, "default": DEFAULT, "tuned": tuned}.items()
    ]
    for row in rows:
        print(f"seed {row['seed']}  {row['name']:8} loss {row['loss']:.4f}  skipped {row['skipped']}")
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{platform.machine()} CPU, 1 thread; fp16 gradients by rounding",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "wall_s": round(time.perf_counter() - start, 1),
        "tuned": asdict(tuned),
        "runs": rows,
        "num_trials": num_trials,
    }
    RESULT.parent.mkdir(exist_ok=True)
    write_text(RESULT, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
