"""What only a GPU can say, in one run of less than eight minutes and without a network.

    python benchmarks/gpu.py                  # on a machine without a GPU the same runs at tiny sizes
    python benchmarks/gpu.py --parts blocks   # one part alone

Parts, in this order, each within its own time limit:

``blocks``  one Llama-like block at several sizes, forward and backward: bf16 autocast, torchao and Transformer Engine
            as their documentation says, each backend of autoprec's forced, and what ``autoprec.convert`` chooses; eager
            and compiled.  Each is timed against bf16 autocast, interleaved, with an interval and its A/A control; its
            output and input gradient are compared with fp32's.
``suite``   ``pytest -m gpu``.
``tune``    ``autoprec tune --trials 20`` on the built-in GPT.

Writes ``benchmarks/results/gpu_<device>.json`` after each part, so that a run that is cut off keeps what it has.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.atomic import write_text
from autoprec.backends import get_backend, list_backends
from autoprec.measure import describe_environment, measure_ratios

ROOT = Path(__file__).resolve().parent.parent
LIMITS_S = {"blocks": 210.0, "suite": 120.0, "tune": 120.0}


@dataclass(frozen=True)
class Size:
    width: int
    hidden: int
    heads: int
    batch: int
    length: int


SIZES = {
    "cuda": (Size(2048, 5632, 16, 8, 2048), Size(4096, 14336, 32, 4, 2048), Size(8192, 28672, 64, 2, 2048)),
    "cpu": (Size(64, 192, 4, 2, 32),),
}


class Block(nn.Module):
    """Attention and gated MLP, each after an RMS norm, as in Llama."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, hidden = size.width, size.hidden
        self.heads = size.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


@dataclass(frozen=True)
class Method:
    """How the block runs: ``prepare`` changes it in place and gives what is called."""

    prepare: Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]
    compiled: bool = False


def autocast(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return model(x)

    return call


def torchao_own(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=x.device.type == "cpu"))
    return autocast(model, x)


def te_own(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
    from transformer_engine.common.recipe import Float8CurrentScaling  # pyright: ignore[reportMissingImports]

    for name, layer in list(model.named_children()):
        if isinstance(layer, nn.Linear):
            mine = te.Linear(layer.in_features, layer.out_features, bias=False, device=x.device)
            mine.weight.data.copy_(layer.weight.data)
            setattr(model, name, mine)
    recipe, inner = Float8CurrentScaling(), autocast(model, x)

    def call(x: Tensor) -> Tensor:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return inner(x)

    return call


def forced(backend: str) -> Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]:
    def prepare(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
        available, reason = get_backend(backend).available()
        if not available:
            raise RuntimeError(reason)
        low = autoprec.Formats.all("bf16")
        hybrid = autoprec.Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
        rules = (
            autoprec.PlanRule(match=("*_proj",), formats=hybrid, backend=(backend,), reason="forced", source="user"),
            autoprec.PlanRule(match=("*::scaled_dot_product_attention",), formats=low, reason="16 bit", source="user"),
            autoprec.PlanRule(match=("norm*",), formats=autoprec.Formats.all("fp32"), reason="norm", source="user"),
        )
        return autoprec.convert(model, plan=autoprec.Plan(rules=rules))

    return prepare


def chosen(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    return autoprec.convert(model, target="auto", example_inputs=x)


METHODS: dict[str, Method] = {
    "fp32": Method(lambda model, x: model),
    "bf16 autocast": Method(autocast),
    "autoprec": Method(chosen),
    **{f"autoprec, {name} forced": Method(forced(name)) for name in list_backends() if name != "emulated"},
    "torchao": Method(torchao_own),
    "Transformer Engine": Method(te_own),
    "bf16 autocast, compiled": Method(autocast, compiled=True),
    "autoprec, compiled": Method(chosen, compiled=True),
    "torchao, compiled": Method(torchao_own, compiled=True),
}
BASELINES = ("bf16 autocast", "bf16 autocast, compiled")


def build(size: Size, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """The same block, input and output gradient each time."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Block(size)
        x = torch.randn(size.batch, size.length, size.width)
        grad = torch.randn(size.batch, size.length, size.width) / size.width
    return model, x, grad


def run_once(call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    output = call(leaf)
    output.backward(grad.to(output.dtype))
    assert leaf.grad is not None
    return output.detach().float(), leaf.grad.float()


def make_step(method: Method, size: Size, device: torch.device) -> tuple[Callable[[], object], nn.Module, list[Tensor]]:
    """A step of the method, its model, and the output and input gradient of its first step."""
    model, x, grad = build(size, device)
    call = method.prepare(model, x)
    if method.compiled:
        call = torch.compile(call)
    results = list(run_once(call, x, grad))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_()
        output = call(leaf)
        output.backward(grad.to(output.dtype))

    return step, model, results


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def got_of(model: nn.Module) -> dict[str, int]:
    """Sites of a converted model by what they got; empty for the others."""
    try:
        rows = autoprec.receipt(model).rows
    except autoprec.AutoprecError:
        return {}
    return dict(Counter(f"{row.got} by {row.mechanism}" for row in rows))


def measure_block(size: Size, device: torch.device, rounds: int, deadline: float) -> dict[str, Any]:
    model, x, grad = build(size, device)
    reference = run_once(model, x, grad)
    del model
    rows: dict[str, Any] = {}
    baseline: Callable[[], object] | None = None
    for name, method in METHODS.items():
        if time.monotonic() > deadline:
            rows[name] = {"left_out": "the part's time is over"}
            continue
        gc.collect()
        torch.compiler.reset()
        try:
            if name in BASELINES:
                baseline = None  # frees the former one
                baseline = make_step(method, size, device)[0]
            step, model, results = make_step(method, size, device)
            assert baseline is not None or name == "fp32"
            timed = measure_ratios({"it": step}, baseline or step, rounds=rounds, device=device)["it"]
        except Exception as error:  # one method's failure is a result, not the end of the others
            rows[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        rows[name] = {
            **({} if baseline is None else {"speed_over_bf16_autocast": timed.speedup.to_json()}),
            "control": timed.control.to_json(),
            "step_ms": 1000 * timed.candidate_s,
            "error_output": relative_error(results[0], reference[0]),
            "error_grad_input": relative_error(results[1], reference[1]),
            "sites": got_of(model),
        }
        speed = "" if baseline is None else f"  {timed.speedup.value:.3f}x bf16 autocast"
        print(f"{size.width:6} {name:40} {1000 * timed.candidate_s:9.3f} ms{speed}", flush=True)
        del step, model, results
    return {"size": asdict(size), "methods": rows}


def blocks(device: torch.device, deadline: float) -> Any:
    measured = []
    for size in SIZES["cpu" if device.type == "cpu" else "cuda"]:
        measured.append(measure_block(size, device, rounds=9 if device.type == "cpu" else 15, deadline=deadline))
        gc.collect()
        if device.type != "cpu":
            torch.cuda.empty_cache()
    return measured


def suite(device: torch.device, deadline: float) -> Any:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=deadline - time.monotonic()
        )
    except subprocess.TimeoutExpired as error:
        return {"timed_out": True, "tail": str(error.stdout or "")[-4000:]}
    return {"exit_code": done.returncode, "tail": (done.stdout + done.stderr)[-6000:]}


def tune(device: torch.device, deadline: float) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        limit = None if device.type == "cpu" else deadline - time.monotonic()
        task, trials = ("gpt", 20) if device.type != "cpu" else (tiny_task(), 6)
        result = autoprec.tune(task, target="auto", trials=trials, timeout=limit, output_dir=folder)
    document = result.to_json()
    return {key: document[key] for key in ("verdict", "outcome", "plan", "confirmations", "settings")} | {
        "trials": [
            {k: row[k] for k in ("name", "formats", "loss_gap", "state", "note")}
            | {"speedup": row["speedup"] and row["speedup"]["value"]}
            for row in document["trials"]
        ]
    }


def tiny_task() -> autoprec.Task:
    from autoprec.tasks.byte_gpt import make_task

    return make_task(width=32, layers=2, heads=2, context=32, batch=2)


PARTS: dict[str, Callable[[torch.device, float], Any]] = {"blocks": blocks, "suite": suite, "tune": tune}


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "torchao", "transformer_engine", "optuna", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, help="by default benchmarks/results/gpu_<device>.json")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    environment = describe_environment(device)
    name = "".join(c if c.isalnum() else "-" for c in environment.device.lower())
    path = options.output or ROOT / "benchmarks" / "results" / f"gpu_{name}.json"
    result: dict[str, Any] = {
        "environment": environment.to_json(),
        "versions": versions(),
        "backends": {name: get_backend(name).available() for name in list_backends()},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": {},
    }
    for part in options.parts:
        start = time.monotonic()
        try:
            result[part] = PARTS[part](device, start + LIMITS_S[part])
        except Exception as error:  # what the other parts find is kept
            result[part] = {"failed": f"{type(error).__name__}: {str(error)[:1000]}"}
        result["seconds"][part] = round(time.monotonic() - start, 1)
        write_text(path, json.dumps(result, indent=1) + "\n")
        print(f"{part}: {result['seconds'][part]} s", flush=True)


if __name__ == "__main__":
    main()
