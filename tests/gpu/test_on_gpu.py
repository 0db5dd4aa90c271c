"""What a converted model does on a GPU.  ``AUTOPREC_GPU_TESTS_DEVICE=cpu`` runs the same code where there is none."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.backends import LinearSpec, choose, get_backend, list_backends
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.recipes import CurrentRecipe
from autoprec.tasks.byte_gpt import make_task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")


@pytest.fixture
def device():
    asked = os.environ.get("AUTOPREC_GPU_TESTS_DEVICE", "cuda")
    if asked == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device")
    return torch.device(asked)


class Block(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.heads = 8
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_block(device):
    torch.manual_seed(0)
    return Block().to(device), torch.randn(4, 128, 1024, device=device)


def step(model, x):
    leaf = x.clone().requires_grad_()
    output = model(leaf)
    output.float().square().mean().backward()
    return output.detach().float(), leaf.grad.float()


def error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


def test_auto_converts_near_fp32_and_says_what_each_site_got(device):
    model, x = make_block(device)
    wanted = step(model, x)
    autoprec.convert(model, target="auto", example_inputs=x)
    got = step(model, x)
    receipt = autoprec.receipt(model)
    assert receipt.low_precision_share > 0.9
    assert max(map(error, got, wanted)) < 0.05
    if device.type == "cuda":
        assert not [row.site for row in receipt.rows if row.mechanism == "backend:emulated"]


@pytest.mark.parametrize("backend", [name for name in list_backends() if name != "emulated"])
def test_hardware_agrees_with_the_emulated_reference(device, backend):
    torch.manual_seed(0)
    x = torch.randn(256, 512, device=device, dtype=torch.bfloat16)
    weight = torch.randn(384, 512, device=device) / 512**0.5
    grad = torch.randn(256, 384, device=device, dtype=torch.bfloat16)
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    chosen, reason = choose("linear", HYBRID, x, weight, (backend,), "training", recipe=spec.recipe)
    if chosen is None:
        pytest.skip(reason)

    def run(name):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        output = get_backend(name).linear(*leaves, None, spec)
        output.backward(grad)
        return [output.detach().float(), *(leaf.grad.float() for leaf in leaves)]

    for got, wanted in zip(run(backend), run("emulated"), strict=True):
        assert error(got, wanted) < 2**-7  # bf16 outputs, and fewer bits while FP8 tensor cores accumulate


@pytest.mark.parametrize("backend", [name for name in list_backends() if name != "emulated"])
def test_a_forced_backend_trains(device, backend):
    available, reason = get_backend(backend).available()
    if not available:
        pytest.skip(reason)
    model, x = make_block(device)
    rule = PlanRule(match=("qkv", "out", "up", "down"), formats=HYBRID, backend=(backend,), source="user")
    autoprec.convert(model, plan=Plan(rules=(rule,)), example_inputs=x)
    rows = {row.site: row for row in autoprec.receipt(model).rows}
    assert {rows[name].mechanism for name in ("qkv", "out", "up", "down")} == {f"backend:{backend}"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (model(x).float() - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_compiled_agrees_with_eager(device):
    model, x = make_block(device)
    autoprec.convert(model, target="auto", example_inputs=x)
    eager = step(model, x)
    compiled = step(torch.compile(model), x)
    assert max(map(error, compiled, eager)) < 0.02


def test_a_converted_model_moves_between_devices(device):
    model, x = make_block(torch.device("cpu"))
    autoprec.convert(model, target="h100", formats="bf16")
    wanted = step(model, x)[0]
    model.to(device)
    assert error(step(model, x.to(device))[0].cpu(), wanted) < 0.02


def test_tune_finds_a_plan_that_holds(device, tmp_path):
    task = make_task(width=64, layers=2, heads=2, context=64, batch=2)
    result = autoprec.tune(task, trials=5, output_dir=tmp_path, max_loss_increase=0.05)
    assert len(result.trials) == 5
    assert result.environment.device_kind == device.type
    assert autoprec.load_plan(tmp_path / "plan.json").sha256 == result.plan.sha256
