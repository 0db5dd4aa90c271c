"""Do the sums of one-pass scores rank mixes by the loss that they lose in real training?

    python benchmarks/scores.py            # some 20 minutes on one core

The models of ``optimality_tables.py``, each Linear with a format of its own, train to a checkpoint in fp32; random
mixes then train from it on the same batches as fp32, in emulated formats.  The gap of a mix is the mean difference of
the training loss over all steps and data seeds, as a share of fp32's.

Beside the sum of harms: sums of each of its parts, of the gradient error of one site at a time, and the rank
correlation of the gap on one data seed with the gap on another, which says how much of one seed's gap is chance.
Seconds are of the wall clock, whatever else the machine does.

Writes ``benchmarks/results/scores.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from optimality_models import CASES, Case
from optimality_tables import RECIPE, train
from scipy.stats import spearmanr
from torch import nn

from autoprec.atomic import write_text
from autoprec.graph.record import record
from autoprec.measure import describe_environment
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.tune.posing.gradient_errors import Loss, group_gradient_errors
from autoprec.tune.posing.scores import score_sites
from autoprec.tune.space import role_formats

RESULT = Path(__file__).parent / "results" / "scores.json"
STEPS = {"gpt": 20, "lstm": 40, "cnn": 20}
WARM_UP, SEEDS, TOGETHER = 300, (1, 2, 3), 27
MILD = ("bf16", "mxfp8", "fp8_e4m3")
LOW = (*MILD, "fp8_e5m2", "int8", "nvfp4")
Mix = tuple[str, ...]


def each_layer_alone(case: Case) -> Case:
    """The case with a group for each Linear, the head's included."""
    layers = [name for name, module in case.build(0).named_modules() if isinstance(module, nn.Linear)]
    return dataclasses.replace(case, groups={name: (name,) for name in layers}, special={})


def random_mixes(num_layers: int, count: int) -> list[tuple[str, Mix]]:
    """Half over all formats, half over the mild ones, each with tastes of its own; then the whole-model mixes."""
    draw = random.Random(0)
    mixes: list[tuple[str, Mix]] = []
    for number in range(count):
        kind, names = (("all", LOW), ("mild", MILD))[number % 2]
        weights = [draw.gammavariate(0.6, 1.0) for _ in range(len(names) + 1)]
        mixes.append((kind, tuple(draw.choices(("fp32", *names), weights, k=num_layers))))
    return [*mixes, *(("whole", (name,) * num_layers) for name in LOW)]


def measure_gaps(case: Case, start: Any, mixes: Sequence[Mix], steps: int) -> np.ndarray:
    """``[mixes, data seeds]``."""
    columns = []
    for seed in SEEDS:
        reference = train(case, start, None, seed, steps)[0]
        parts = [mixes[k : k + TOGETHER] for k in range(0, len(mixes), TOGETHER)]
        losses = torch.cat([train(case, start, part, seed, steps)[0] for part in parts], 1)
        columns.append((losses - reference).mean(0) / reference.mean())
    return torch.stack(columns, 1).numpy()


def one_site(site: str, choice: str) -> Plan:
    """All in fp32 but one site; the last rule only names the 16-bit format of its result."""
    rules = [PlanRule(match=(site,), formats=role_formats(choice, "training"))]
    rules += [PlanRule(match=("*::*",), formats=Formats.all(name)) for name in ("fp32", "bf16")]
    return Plan(rules=tuple(rules), recipe=RECIPE)


def estimates(model: nn.Module, losses: Sequence[Loss]) -> tuple[dict[str, dict[tuple[str, str], float]], dict]:
    """Estimate → (layer, format) → its number; and the seconds that the two kinds took."""
    sites = {s.id: s.module for s in record(model, losses[0], grad=True).sites.values() if s.op == "linear"}
    started = time.perf_counter()
    scores = score_sites(model, losses, dict.fromkeys(sites, LOW), lambda c: role_formats(c, "training"), recipe=RECIPE)
    scored = time.perf_counter()
    keys = list(itertools.product(sites, LOW))
    alone = group_gradient_errors(model, losses, {key: one_site(*key) for key in keys})
    seconds = {"scores": round(scored - started, 2), "one site at a time": round(time.perf_counter() - scored, 2)}
    parts = ("harm", "fisher", "weight_grad", "input_grad")
    found = {part: {(sites[s], c): getattr(scores[s][c], part) for s, c in keys} for part in parts}
    medians = [float(np.median([v for v in found[part].values() if v > 0])) for part in parts[1:3]]
    found["harm without input_grad"] = {
        key: found["fisher"][key] / medians[0] + found["weight_grad"][key] / medians[1] for key in found["harm"]
    }
    found["gradient error, one site at a time"] = {(sites[s], c): alone[s, c].relative for s, c in keys}
    return found, seconds


def rank(values: Sequence[float] | np.ndarray, truth: Sequence[float] | np.ndarray) -> float:
    return round(float(spearmanr(values, truth).statistic), 3)


def run(name: str, count: int) -> dict[str, Any]:
    case = each_layer_alone(CASES[name]())
    curve, weights, optimizer = train(case, None, None, 0, WARM_UP)
    kinds, mixes = zip(*random_mixes(len(case.groups), count), strict=True)
    started = time.perf_counter()
    by_seed = measure_gaps(case, (weights, optimizer), mixes, STEPS[name])
    training_s = time.perf_counter() - started
    gap = by_seed.mean(1)

    model = case.build(0)
    model.load_state_dict(weights, strict=False)
    batches = list(itertools.islice(case.batches(99), 3))
    found, seconds = estimates(model.train(), [lambda m, b=b: case.loss(m, b) for b in batches])
    sums = {label: [_sum(values, case.groups, mix) for mix in mixes] for label, values in found.items()}
    subsets = {
        "all": [k for k, kind in enumerate(kinds) if kind != "whole"],
        "mild": [k for k, kind in enumerate(kinds) if kind == "mild"],
    }
    ranks = {
        label: {subset: rank(np.take(values, ks), gap[ks]) for subset, ks in subsets.items()}
        for label, values in sums.items()
    }
    ranks["the gap itself, on another data seed"] = {
        subset: round(float(np.mean([rank(by_seed[ks, a], by_seed[ks, b]) for a, b in ((0, 1), (0, 2), (1, 2))])), 3)
        for subset, ks in subsets.items()
    }
    print(name, json.dumps(ranks, indent=1), flush=True)
    rows = [
        {
            "kind": kind,
            "mix": mix,
            "gap_by_seed": [round(g, 7) for g in by_seed[k].tolist()],
            **{label: float(f"{values[k]:.4g}") for label, values in sums.items()},
        }
        for k, (kind, mix) in enumerate(zip(kinds, mixes, strict=True))
    ]
    return {
        "layers": list(case.groups),
        "warm_up": WARM_UP,
        "checkpoint_loss": round(float(curve[-20:].mean()), 4),
        "steps": STEPS[name],
        "data_seeds": SEEDS,
        "seconds": {**seconds, "training of all mixes": round(training_s, 1)},
        "spearman_with_the_gap": ranks,
        "least_whole_model_harm": min(LOW, key=lambda f: sums["harm"][mixes.index((f,) * len(case.groups))]),
        "rows": rows,
    }


def _sum(values: Mapping[tuple[str, str], float], layers: Mapping[str, Any], mix: Mix) -> float:
    return sum(values[key] for key in zip(layers, mix, strict=True) if key[1] != "fp32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--mixes", type=int, default=48)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "environment": describe_environment("cpu").to_json(),
        "formats": LOW,
        "recipe": RECIPE,
        "tasks": {},
    }
    for name in options.cases:
        document["tasks"][name] = run(name, options.mixes)
        write_text(options.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
