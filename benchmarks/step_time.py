"""Step time of fp32, ``torch.autocast``, ``model.bfloat16()`` and autoprec, interleaved in one process.

    python benchmarks/step_time.py                      # all models, eager
    python benchmarks/step_time.py --compile            # under torch.compile (inductor)
    python benchmarks/step_time.py --only gpt --rounds 25

Writes ``benchmarks/results/step_time[_compiled].json``.  Ratios are of ``torch.autocast``'s time to the method's: above
1 is faster than autocast.  Each comes with its 95% interval and the A/A control of the same rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.measure import describe_environment, measure_ratios

RESULTS = Path(__file__).parent / "results"
METHODS = ("fp32", "bfloat16", "autoprec")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, one batch, and the loss of an output."""

    build: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    loss: Callable[[Any], torch.Tensor]


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.skip(x))


class ResNet(nn.Module):
    """ResNet-18 for 64x64 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
        self.blocks = nn.Sequential(*[Block(*w) for w in widths], Block(512, 512, 1))
        self.head = nn.Linear(512, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class LSTM(nn.Module):
    def __init__(self, width: int = 640) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, 3, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def gpt(width: int, layers: int, context: int, batch: int) -> Case:
    from autoprec.tasks.byte_gpt import ByteGPT

    tokens = torch.randint(0, 256, (batch, context))
    return Case(
        lambda: ByteGPT(width=width, layers=layers, heads=width // 64, context=context),
        (tokens,),
        lambda out: F.cross_entropy(out.float().flatten(0, 1), tokens.flatten()),
    )


def resnet() -> Case:
    labels = torch.randint(0, 100, (16,))
    return Case(ResNet, (torch.randn(16, 3, 64, 64),), lambda out: F.cross_entropy(out.float(), labels))


def lstm() -> Case:
    tokens = torch.randint(0, 256, (16, 64))
    return Case(LSTM, (tokens,), lambda out: F.cross_entropy(out.float().flatten(0, 1), tokens.flatten()))


def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=1000, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536
    )
    tokens = torch.randint(0, 1000, (8, 128))
    return Case(
        lambda: BertForMaskedLM(config),
        (tokens,),
        lambda out: F.cross_entropy(out.logits.float().flatten(0, 1), tokens.flatten()),
    )


CASES: dict[str, Callable[[], Case]] = {
    "gpt_tiny": lambda: gpt(64, 2, 64, 2),
    "gpt_3m": lambda: gpt(256, 4, 256, 4),
    "gpt_11m": lambda: gpt(384, 6, 256, 8),
    "resnet_11m": resnet,
    "lstm_10m": lstm,
    "bert_11m": bert,
}


def make_step(case: Case, method: str, train: bool, compiled: bool) -> Callable[[], object]:
    """One training or inference step of the case under a method."""
    torch.manual_seed(0)
    model = case.build().train(train)
    if method == "bfloat16":
        model = model.bfloat16()
    if method == "autoprec":
        autoprec.convert(model, target="cpu-avx512-bf16", mode="training" if train else "inference")
    inputs = tuple(x.bfloat16() if method == "bfloat16" and x.is_floating_point() else x for x in case.inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    call = torch.compile(model) if compiled else model
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=method == "autocast")

    def training_step() -> None:
        optimizer.zero_grad()
        with autocast:
            loss = case.loss(call(*inputs))
        loss.backward()
        optimizer.step()

    def inference_step() -> None:
        with torch.no_grad(), autocast:
            call(*inputs)

    return training_step if train else inference_step


def run(name: str, train: bool, compiled: bool, rounds: int) -> dict[str, Any]:
    case = CASES[name]()
    steps = {method: make_step(case, method, train, compiled) for method in METHODS}
    compared = measure_ratios(steps, make_step(case, "autocast", train, compiled), rounds=rounds)
    row: dict[str, Any] = {"model": name, "mode": "training" if train else "inference", "compiled": compiled}
    row["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    row["parameters"] = sum(p.numel() for p in case.build().parameters())
    for method, comparison in compared.items():
        speedup = comparison.speedup
        row[method] = {"against_autocast": [speedup.value, speedup.low, speedup.high], "s": comparison.candidate_s}
        row["autocast_s"] = comparison.baseline_s
        row["control"] = [comparison.control.value, comparison.control.low, comparison.control.high]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for name in [name for name in CASES if options.only in name]:
        for train in (True, False):
            row = run(name, train, options.compile, options.rounds)
            rows.append(row)
            ratios = "  ".join("{} {:.3f} ({:.3f} … {:.3f})".format(m, *row[m]["against_autocast"]) for m in METHODS)
            head = f"{name:12} {row['mode']:9} autocast {row['autocast_s'] * 1e3:8.2f} ms"
            print(f"{head}  {ratios}  A/A {row['control'][0]:.3f}", flush=True)
    save(rows, RESULTS / ("step_time_compiled.json" if options.compile else "step_time.json"), options.threads)


def save(rows: list[dict[str, Any]], path: Path, threads: int) -> None:
    """Replaces the rows of the models that ran and keeps the others; each says when it was measured."""
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {(row["model"], row["mode"]) for row in rows}
    kept = [row for row in before if (row["model"], row["mode"]) not in new]
    result = {"environment": describe_environment().to_json(), "threads": threads, "rows": kept + rows}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
