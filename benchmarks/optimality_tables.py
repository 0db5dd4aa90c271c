"""Tables of three small models: the real loss gap of every mix, and a cost model's seconds.

    python benchmarks/optimality_tables.py            # goes on where it was interrupted

Each gap is measured: training from one checkpoint in emulated formats, paired with fp32 on the same batches, the mean
over all steps as a share of fp32's loss, on three data seeds.  Many mixes train at once, each with its own weights:
parameters carry a leading dimension, and each layer runs its mixes through the ``emulated`` backend, format by format.
The CNN's convolutions are patches times a Linear and the LSTM's cells Linears, so that every product can take every
format; the rest is fp32.

Seconds are the roofline's for a B200 with every dimension of the model times 64, since no device is fast at the sizes
that can be trained here.

Writes ``benchmarks/results/optimality_tables.json``, which ``benchmarks/optimality.py`` reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from optimality_models import CASES, Case, Linears
from torch import Tensor

from autoprec.atomic import write_text
from autoprec.backends import LinearSpec, get_backend
from autoprec.estimate import LinearShape, linear_seconds
from autoprec.graph.record import record
from autoprec.measure import describe_environment
from autoprec.recipes import NVFP4Recipe, recipe_for
from autoprec.target import load_target
from autoprec.tune.posing.scores import score_sites
from autoprec.tune.space import role_formats

RESULT = Path(__file__).parent / "results" / "optimality_tables.json"
TARGET, SCALE = "b200", 64
#: Share of the all-bf16 step that no choice changes: norms, attention, optimizer.
FIXED_SHARE = 0.25
#: Without rotation and random rounding fp4 is a format that a model may or may not bear: something to search for.
RECIPE = {"nvfp4": NVFP4Recipe(hadamard=False, stochastic_rounding=False).to_dict()}
WARM_UP, STEPS, SEEDS = 500, 20, (1, 2, 3)
#: Mixes that train at once.
TOGETHER = 48
Mix = tuple[str, ...]
State = dict[str, Tensor]


class Products(Linears):
    """The Linears of many mixes.

    Args:
        case: the model.
        mixes: one format for each group; None is fp32 alone.
    """

    def __init__(self, case: Case, mixes: Sequence[Mix] | None) -> None:
        self._rows: dict[str, list[tuple[str, Tensor]]] = {}
        for k, layers in enumerate(case.groups.values()):
            names = [mix[k] for mix in mixes or ()]
            rows = [(f, torch.tensor([i for i, n in enumerate(names) if n == f])) for f in dict.fromkeys(names)]
            self._rows |= dict.fromkeys(layers, rows)

    def __call__(self, params: State, name: str, x: Tensor) -> Tensor:
        weight, bias = params[f"{name}.weight"], params.get(f"{name}.bias")
        if bias is None:
            bias = weight.new_zeros(weight.shape[:2])
        rows = self._rows.get(name, [])
        if not rows:
            return _product("fp32", x, weight, bias)
        parts = [_product(f, x[i], weight[i], bias[i]) for f, i in rows]
        order = torch.cat([i for _, i in rows]).argsort()
        return torch.cat(parts)[order]


def _product(name: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``[M, rows, in] → [M, rows, out]`` of M mixes."""
    if name in ("fp32", "bf16"):
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        return torch.bmm(x.to(dtype), weight.to(dtype).transpose(1, 2)).float() + bias[:, None]
    formats = role_formats(name, "training")
    recipe = recipe_for((formats.input, formats.weight, formats.grad_output), RECIPE)
    spec = LinearSpec(formats=formats, recipe=recipe, output_dtype=torch.bfloat16)
    backend = get_backend("emulated")

    def one(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return backend.linear(x, weight, bias, spec)

    return torch.vmap(one)(x, weight, bias).float()


def train(
    case: Case, start: tuple[State, dict[str, Any]] | None, mixes: Sequence[Mix] | None, seed: int, steps: int
) -> tuple[Tensor, State, dict[str, Any]]:
    """Losses ``[steps, M]``, and where the parameters and the optimizer end; ``start`` has no mix dimension."""
    count = len(mixes or (None,))
    weights = case.build(0).state_dict() if start is None else start[0]
    params = {
        name: w.expand(count, *w.shape).clone().requires_grad_() for name, w in weights.items() if _is_param(name)
    }
    optimizer = case.optimizer(list(params.values()))
    if start is not None:
        optimizer.load_state_dict(_stacked(start[1], count))
    products = Products(case, mixes)
    losses = []
    for batch in itertools.islice(case.batches(seed), steps):
        optimizer.zero_grad()
        loss = case.losses(params, products, batch)
        loss.sum().backward()
        optimizer.step()
        losses.append(loss.detach())
    final = {name: p.detach()[0].clone() for name, p in params.items()}
    return torch.stack(losses), final, optimizer.state_dict()


def _is_param(name: str) -> bool:
    return not name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def _stacked(state: dict[str, Any], count: int) -> dict[str, Any]:
    """An optimizer's state of one mix as that of ``count``."""
    each = {
        k: {
            name: v.expand(count, *v.shape[1:]).clone() if torch.is_tensor(v) and v.dim() else v
            for name, v in values.items()
        }
        for k, values in state["state"].items()
    }
    return {"state": each, "param_groups": state["param_groups"]}


def costs_of(case: Case) -> dict[str, dict[str, float]]:
    """Group → format → estimated seconds of a step on the scaled target; fp32 and bf16 too, as units."""
    model = case.build(0)
    batch = next(case.batches(0))
    sites = {site.module: site for site in record(model, lambda m: case.loss(m, batch)).sites.values()}
    target = load_target(TARGET)
    return {
        group: {
            name: sum(
                case.calls.get(layer, 1)
                * linear_seconds(_shape(sites[layer]), target, role_formats(name, "training"), "bf16", "training")
                for layer in layers
            )
            for name in dict.fromkeys(("fp32", "bf16", *case.choices[group]))
        }
        for group, layers in case.groups.items()
    }


def _shape(site: Any) -> LinearShape:
    out_features, in_features = site.input_shapes[1]
    rows = math.prod(site.input_shapes[0][:-1])
    return LinearShape(num_tokens=SCALE * rows, in_features=SCALE * in_features, out_features=SCALE * out_features)


def scores_of(case: Case, weights: State) -> dict[str, dict[str, float]]:
    """Group → format → harm, from one pass over three batches at the checkpoint."""
    model = case.build(0)
    model.load_state_dict(weights, strict=False)
    model.train()
    batches = list(itertools.islice(case.batches(SEEDS[0]), 3))
    losses = [lambda m, batch=batch: case.loss(m, batch) for batch in batches]
    names = sorted({name for choices in case.choices.values() for name in choices})
    sites = {s.id: s.module for s in record(model, losses[0]).sites.values() if s.op == "linear"}
    scores = score_sites(
        model, losses, dict.fromkeys(sites, names), lambda name: role_formats(name, "training"), recipe=RECIPE
    )
    harm = {(module, name): 0.0 for module in sites.values() for name in names}
    for site, module in sites.items():
        for name in names:
            harm[module, name] += scores[site][name].harm
    return {
        group: {name: sum(harm[layer, name] for layer in layers) for name in case.choices[group]}
        for group, layers in case.groups.items()
    }


def measure(name: str, table: dict[str, Any], save: Callable[[], None]) -> None:
    """Fill one table; gaps are in the order of ``itertools.product`` over the choices."""
    case = CASES[name]()
    curve, weights, optimizer = train(case, None, None, 0, WARM_UP)
    start = weights, optimizer
    costs = costs_of(case)
    bf16 = sum(cost["bf16"] for cost in costs.values())
    table |= {
        "choices": {group: list(names) for group, names in case.choices.items()},
        "costs_s": costs,
        "fixed_s": bf16 * FIXED_SHARE / (1 - FIXED_SHARE),
        "scores": scores_of(case, weights),
        "steps": STEPS,
        "seeds": list(SEEDS),
        "warm_up": WARM_UP,
        "checkpoint_loss": round(float(curve[-20:].mean()), 4),
    }
    references = {seed: train(case, start, None, seed, STEPS)[0] for seed in SEEDS}
    gaps = table.setdefault("gaps", [])
    mixes = list(itertools.product(*case.choices.values()))
    for part in _parts(mixes[len(gaps) :]):
        began = time.monotonic()
        columns = [
            (train(case, start, part, seed, STEPS)[0] - references[seed]).mean(0) / references[seed].mean()
            for seed in SEEDS
        ]
        gaps += [[round(g, 7) for g in row] for row in torch.stack(columns, 1).tolist()]
        table["wall_s"] = round(table.get("wall_s", 0.0) + time.monotonic() - began, 1)
        print(f"{name}: {len(gaps)} of {len(mixes)} mixes, {table['wall_s']:.0f} s", flush=True)
        save()


def _parts(mixes: Sequence[Mix]) -> Iterator[Sequence[Mix]]:
    for k in range(0, len(mixes), TOGETHER):
        yield mixes[k : k + TOGETHER]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = json.loads(RESULT.read_text()) if RESULT.is_file() else {"tables": {}}
    tables["environment"] = describe_environment("cpu").to_json()
    tables["cost_model"] = f"roofline of {TARGET}, every dimension times {SCALE}, fixed share of bf16 {FIXED_SHARE}"

    def save() -> None:
        write_text(RESULT, json.dumps(tables, separators=(",", ":")) + "\n")

    for name in options.cases:
        measure(name, tables["tables"].setdefault(name, {}), save)


if __name__ == "__main__":
    main()
