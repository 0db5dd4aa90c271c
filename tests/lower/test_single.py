"""TF32 by a plan: the operands of all three products are rounded, and nothing else is."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.formats import round_to
from autoprec.lower.gemm import GemmSettings, gemm_action
from autoprec.plan import Formats, Plan, PlanRule

TF32 = Formats.all("tf32")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def r(x: Tensor) -> Tensor:
    return round_to(x, "tf32")


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear": (F.linear, (draw(2, 7, 24), draw(16, 24))),
    "matmul": (torch.matmul, (draw(2, 7, 24), draw(24, 16))),
    "mm": (torch.mm, (draw(7, 24), draw(24, 16))),
    "bmm": (torch.bmm, (draw(3, 7, 24), draw(3, 24, 16))),
    "mv": (torch.mv, (draw(7, 24), draw(24))),
    "inner": (torch.inner, (draw(7, 24), draw(16, 24))),
    "einsum": (lambda a, b: torch.einsum("bik,bjk->bij", a, b), (draw(2, 7, 24), draw(2, 5, 24))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=1), (draw(7, 24), draw(24, 16))),
    "conv1d": (F.conv1d, (draw(2, 8, 12), draw(16, 8, 3))),
    "conv2d": (F.conv2d, (draw(2, 8, 6, 6), draw(4, 8, 3, 3))),
    "conv3d": (F.conv3d, (draw(1, 4, 5, 5, 5), draw(4, 4, 3, 3, 3))),
    "conv_transpose2d": (F.conv_transpose2d, (draw(2, 8, 6, 6), draw(8, 4, 3, 3))),
}


def run(compute: Callable[..., Tensor], *tensors: Tensor, grad: Tensor | None = None) -> list[Tensor]:
    """Output and gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = compute(*leaves)
    out.backward(draw(*out.shape, seed=9).to(out.dtype) if grad is None else grad)
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("op", CALLS)
def test_every_product_multiplies_rounded_operands(op: str) -> None:
    func, (a, b) = CALLS[op]
    action = gemm_action(op, TF32, (), GemmSettings())
    got = run(lambda *t: action(func, t, {}), a, b)
    grad = r(draw(*got[0].shape, seed=9))
    wanted = run(func, r(a).double(), r(b).double(), grad=grad.double())
    size = run(func, r(a).double().abs(), r(b).double().abs(), grad=grad.double().abs())
    for g, w, s in zip(got, wanted, size, strict=True):
        assert (
            (g.double() - w).abs() <= s * 64 * 2.0**-24
        ).all()  # of fp32 accumulation, and far below TF32's 2 ** -11
    plain = run(func, a, b)
    assert not any(torch.allclose(g, p, rtol=0, atol=1e-6) for g, p in zip(got, plain, strict=True))


@pytest.mark.parametrize("op", ["linear", "conv2d"])
def test_a_bias_is_not_rounded(op: str) -> None:
    func, (a, b) = CALLS[op]
    bias = draw(b.shape[0], seed=3)
    action = gemm_action(op, TF32, (), GemmSettings())
    with_bias = run(lambda *t: action(func, t, {}), a, b, bias)
    without = run(lambda *t: action(func, t, {}), a, b)
    shaped = bias.view(-1, *[1] * (b.dim() - 2))
    assert torch.equal(with_bias[0], without[0] + shaped)
    grad = draw(*without[0].shape, seed=9)
    dims = [d for d in range(grad.dim()) if d != (grad.dim() - 1 if op == "linear" else 1)]
    torch.testing.assert_close(with_bias[3], grad.sum(dims), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "func", "shapes"),
    [
        ("addmm", torch.addmm, ((16,), (7, 24), (24, 16))),
        ("addmv", torch.addmv, ((7,), (7, 24), (24,))),
        ("baddbmm", torch.baddbmm, ((3, 7, 16), (3, 7, 24), (3, 24, 16))),
    ],
)
@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
def test_what_is_added_is_not_rounded(op: str, func: Any, shapes: Any, beta: float) -> None:
    added, a, b = (draw(*shape, seed=i) for i, shape in enumerate(shapes))
    if beta == 0:
        added = added * torch.nan  # torch ignores it then
    action = gemm_action(op, TF32, (), GemmSettings())
    got = action(func, (added, a, b), {"beta": beta, "alpha": 2.0})
    torch.testing.assert_close(got, func(added, r(a), r(b), beta=beta, alpha=2.0), rtol=1e-5, atol=1e-5)


def test_infinity_and_nan_are_not_hidden() -> None:
    x, w = draw(4, 24), draw(16, 24)
    x[0, 0], x[1, 0] = torch.inf, torch.nan
    out = gemm_action("linear", TF32, (), GemmSettings())(F.linear, (x, w), {})
    assert not out[:2].isfinite().any()
    assert out[2:].isfinite().all()


def test_what_is_more_than_one_product_stays_fp32() -> None:
    q = draw(1, 2, 8, 16)
    action = gemm_action("scaled_dot_product_attention", TF32, (), GemmSettings())
    assert torch.equal(action(F.scaled_dot_product_attention, (q, q, q), {}), F.scaled_dot_product_attention(q, q, q))
    matrices = draw(4, 4), draw(4, 4, seed=1), draw(4, 4, seed=2)
    action = gemm_action("einsum", TF32, (), GemmSettings())
    assert torch.equal(action(torch.einsum, ("ab,bc,cd->ad", *matrices), {}), torch.einsum("ab,bc,cd->ad", *matrices))


def test_doubles_and_integers_are_left_alone() -> None:
    action = gemm_action("matmul", TF32, (), GemmSettings())
    x = draw(4, 4).double()
    assert torch.equal(action(torch.matmul, (x, x), {}), x @ x)
    n = torch.arange(16).reshape(4, 4)
    assert torch.equal(action(torch.matmul, (n, n), {}), n @ n)
    out = torch.empty(4, 4)
    action(torch.mm, (draw(4, 4), draw(4, 4)), {"out": out})
    assert torch.equal(out, draw(4, 4) @ draw(4, 4))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.conv = nn.Linear(24, 16), nn.Conv1d(16, 8, 3)
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(torch.relu(self.first(x)).transpose(1, 2)).transpose(1, 2) @ self.w
        return F.scaled_dot_product_attention(x, x, x)


def converted(**options: Any) -> nn.Module:
    plan = Plan(rules=(PlanRule(match=("*",), formats=TF32, reason="as fast as it gets in fp32"),))
    return autoprec.convert(Net(), plan=plan, **options)


def test_the_receipt_says_what_ran_in_tf32() -> None:
    receipt = autoprec.receipt(converted(example_inputs=draw(2, 10, 24)))
    assert [receipt[site].got for site in ("first", "conv", "::matmul#0")] == ["tf32"] * 3
    attention = receipt["::scaled_dot_product_attention#0"]
    assert attention.got == "fp32"
    assert "tf32 is the rounding of one product's operands" in attention.why
    assert receipt.refused == (attention,)


def test_a_model_copies_and_pickles_and_comes_back() -> None:
    model, plain, x = converted(), Net(), draw(2, 10, 24)
    out = model(x)
    assert not torch.equal(out, plain(x))
    torch.testing.assert_close(out, plain(x), rtol=0, atol=0.1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), out)
    assert torch.equal(autoprec.revert(model)(x), plain(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own way
def test_compiles_in_one_graph_to_the_same_bits() -> None:
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model = converted()
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        out = call(draw(2, 10, 24))
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_for_each_sample() -> None:
    model, x = converted(), draw(3, 10, 24)
    parameters = dict(model.named_parameters())

    def loss(parameters: Any, sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (sample[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        for name, grad in torch.func.grad(loss)(parameters, sample).items():
            torch.testing.assert_close(per_sample[name][i], grad, rtol=1e-4, atol=1e-4)
