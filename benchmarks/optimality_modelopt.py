"""What ModelOpt's ``auto_quantize`` chooses on the models of ``optimality_tables.py``.

    python benchmarks/optimality_modelopt.py       # needs nvidia-modelopt 0.47; a minute on one core

It has no budget of loss or time: it takes a number of effective bits a weight and minimises a sum of gradient scores.
So it runs at a row of settings from all fp4 to all bf16, and ``benchmarks/optimality.py`` looks each of its plans up
and takes the fastest that is within the loss budget: more than it could know by itself.  Layers that share a group in
the tables are grouped by a rule of its own.  Its kernel that rounds blocks runs on CUDA alone; here ``round_to`` of
autoprec, which rounds the same formats, stands in for it, and all else is ModelOpt's own.

Writes ``benchmarks/results/optimality_modelopt.json``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
from pathlib import Path
from typing import Any

import modelopt
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization import tensor_quant
from modelopt.torch.quantization.algorithms import AutoQuantizeSearcher
from optimality_models import CASES, Case
from optimality_tables import SEEDS, WARM_UP, train
from torch import nn

from autoprec.formats import round_to

RESULT = Path(__file__).parent / "results" / "optimality_modelopt.json"
CONFIGS = {"fp8_e4m3": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG", "mxfp8": "MXFP8_DEFAULT_CFG"}
BITS = (4.6, 4.8, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0, 8.5, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 15.9)
BATCHES = 16


def round_blocks(inputs: torch.Tensor, block_size: int, amax: Any, num_bits: int, *rest: Any) -> torch.Tensor:
    """In place of ModelOpt's CUDA kernel: nvfp4 in blocks of 16, mxfp8 in blocks of 32."""
    name = {(16, 4): "nvfp4", (32, 8): "mxfp8"}[block_size, num_bits]
    return round_to(inputs, name)


class Scored(nn.Module):
    """A model whose forward gives the loss, as the tables' batches need."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        super().__init__()
        self.inner, self._case = model, case

    def forward(self, batch: Any) -> torch.Tensor:
        return self._case.loss(self.inner, batch)


def choose(case: Case, model: nn.Module, bits: float) -> dict[str, str] | None:
    """Group → format at so many effective bits; None where it finds nothing."""
    layers = {layer for group in case.groups.values() for layer in group}
    others = [f"*inner.{name}" for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in layers]
    spaces = [
        {
            "module_name_patterns": [f"*inner.{layer}" for layer in case.groups[group]],
            "quantization_formats": [getattr(mtq, CONFIGS[f]) for f in formats if f != "bf16"],
            "allow_no_quant": "bf16" in formats,
        }
        for group, formats in case.choices.items()
    ]
    try:
        _, state = mtq.auto_quantize(
            Scored(copy.deepcopy(model), case),
            constraints={"effective_bits": bits},
            quantization_formats=[mtq.FP8_DEFAULT_CFG, mtq.NVFP4_DEFAULT_CFG],
            module_search_spaces=spaces,
            data_loader=list(itertools.islice(case.batches(SEEDS[0]), BATCHES)),
            forward_step=lambda m, batch: m(batch),
            loss_func=lambda output, batch: output,
            disabled_layers=others,
            num_calib_steps=BATCHES,
            num_score_steps=BATCHES,
        )
    except ValueError as error:  # fewer bits than the least that the search space allows
        print(f"{bits} bits: {error}", flush=True)
        return None
    recipe = state["best"]["recipe"]
    return {
        group: _format(next(r for key, r in recipe.items() if layers[0] in key))
        for group, layers in case.groups.items()
    }


def _format(recipe: Any) -> str:
    """Our name of a recipe of theirs."""
    text = str(recipe)
    return next((name for name, config in CONFIGS.items() if config.split("_")[0] in text.upper()), "bf16")


def group_rule(case: Case) -> Any:
    """Layers of one group get one format."""
    of = {layer: group for group, layers in case.groups.items() for layer in layers if len(layers) > 1}
    return lambda model, name: of.get(re.sub(r"^inner\.", "", name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensor_quant.dynamic_block_quantize_op = round_blocks
    result: dict[str, Any] = {"version": modelopt.__version__, "bits": list(BITS), "choices": {}}
    for name in options.cases:
        case = CASES[name]()
        model = case.build(0)
        model.load_state_dict(train(case, None, None, 0, WARM_UP)[1], strict=False)
        AutoQuantizeSearcher.quant_grouping_rules.insert(0, group_rule(case))
        result["choices"][name] = [choose(case, model, bits) for bits in BITS]
        AutoQuantizeSearcher.quant_grouping_rules.pop(0)
        print(name, result["choices"][name], flush=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
