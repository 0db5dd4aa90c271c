"""Time and memory of a conversion: a 1B-parameter Llama against ``torch.export`` of it, and a 70B one on meta.

    python benchmarks/convert_time.py                   # needs transformers and 10 GiB of memory
    python benchmarks/convert_time.py --only 70b        # 1 GiB

Each row is measured in a process of its own: ``wall_s`` and ``cpu_s`` (of all threads) of the call alone, best of
``--repeats``, and ``peak_rss_bytes`` of the whole process, model included.  Writes
``benchmarks/results/convert_time.json``.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autoprec
from autoprec.measure import describe_environment

RESULTS = Path(__file__).parent / "results"
TOKENS = 16

#: Config of each model: the sizes of TinyLlama 1.1B and of Llama 3 70B.
MODELS: dict[str, dict[str, int]] = {
    "1b": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000,
    },
    "70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip

#: Where each model lives: 70B parameters fit no small machine, and a plan needs only shapes.
DEVICES = {"1b": "cpu", "70b": "meta"}


def rules(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A plan by rules alone, in the model's forwards."""
    autoprec.convert(model, "a100")
    return {"sites": len(autoprec.receipt(model).rows)}


def examples(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A plan from what was seen on example inputs, in the model's forwards, with a recorded receipt."""
    autoprec.convert(model, "a100", inputs)
    receipt = autoprec.receipt(model)
    return {"sites": len(receipt.rows), "low_precision_share": receipt.low_precision_share}


def export(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """``torch.export`` of the fp32 model, which autoprec doesn't use: how long another tool's capture alone takes."""
    return {"nodes": len(torch.export.export(model, (), inputs, strict=False).graph.nodes)}


def forward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One fp32 call, for scale: example inputs go through the model several times, in fp32 and in the plan."""
    with torch.no_grad():
        model(**inputs)
    return {}


METHODS: dict[str, Callable[[nn.Module, dict[str, torch.Tensor]], dict[str, Any]]] = {
    "rules": rules,
    "examples": examples,
    "export": export,
    "forward": forward,
}


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A Llama with random weights, and a short sequence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(DEVICES[name]):
        config = LlamaConfig(**MODELS[name], use_cache=False)
        if DEVICES[name] == "meta":
            model: nn.Module = LlamaForCausalLM(config)
        else:
            with torch.device("meta"):
                model = LlamaForCausalLM(config)
            model = materialise(model, config)
        # Four dimensions are taken as they are; making a mask of fewer looks at values, which meta tensors lack.
        mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)[None, None]
        ids = torch.randint(0, config.vocab_size, (1, TOKENS))
        return model.eval(), {"input_ids": ids, "attention_mask": mask}


def materialise(model: nn.Module, config: Any) -> nn.Module:
    """Weights drawn with one generator call a tensor; transformers' own initialisation takes minutes at this size."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.uniform_(-0.03, 0.03)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # type: ignore[union-attr]  # its buffer isn't a weight
    return model


def measure(name: str, method: str, repeats: int) -> dict[str, Any]:
    """One row, in this process."""
    model, inputs = build(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    times = []
    found: dict[str, Any] = {}
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        found = METHODS[method](model, inputs)
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
        autoprec.revert(model)
    return {
        "model": name, "method": method, "device": DEVICES[name],
        "parameters": sum(p.numel() for p in model.parameters()), "tokens": TOKENS,
        "wall_s": min(t[0] for t in times), "cpu_s": min(t[1] for t in times), "repeats": repeats,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "rss_before_bytes": before,
        **found,
    }  # fmt: skip


def in_own_process(name: str, method: str, repeats: int) -> dict[str, Any]:
    """One row, from a fresh process, so that its peak is its own."""
    arguments = [sys.executable, __file__, "--row", name, method, "--repeats", str(repeats)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"model": name, "method": method, "error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", choices=["", *MODELS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(*options.row, options.repeats)))
        return
    rows = []
    for name in [options.only] if options.only else MODELS:
        for method in METHODS:
            row = in_own_process(name, method, options.repeats)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if not options.only:
        import transformers

        environment = describe_environment().to_json() | {"transformers": transformers.__version__}
        result = {"environment": environment, "date": time.strftime("%Y-%m-%d"), "rows": rows}
        (RESULTS / "convert_time.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
