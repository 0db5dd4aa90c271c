"""A switch of the process is held for one product and its gradients, and is then as it was, whatever happens."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autoprec
from autoprec.errors import BackendError
from autoprec.lower import switches
from autoprec.lower.gemm import GemmSettings, gemm_action
from autoprec.lower.switches import hold, holding, is_set
from autoprec.plan import Formats, Plan, PlanRule

SWITCH = torch.backends.mkldnn.matmul


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    switches._HOLDERS.clear()
    torch.set_float32_matmul_precision(before)  # which gives the switches values of their own
    torch.backends.fp32_precision = SWITCH.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"


class Watch(TorchDispatchMode):
    """Notes the switch at each product, of the forward and of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            self.seen.append(SWITCH.fp32_precision)
        return func(*args, **(kwargs or {}))


def product(x: Tensor, w: Tensor, precision: str = "tf32") -> Tensor:
    return hold("cpu", "matmul", precision, torch.matmul, (x, w), {})


def operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)


class Net(nn.Module):
    """One product that a rule pins, and one that no rule takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pinned, self.free = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.pinned(x) @ self.free


def pinned_to_fp32() -> nn.Module:
    rule = PlanRule(match=("pinned",), formats=Formats.all("fp32"))
    return autoprec.convert(Net(), plan=Plan(rules=(rule,)))


def test_fp32_by_a_plan_is_fp32_where_the_process_allows_less() -> None:
    torch.set_float32_matmul_precision("medium")
    model = pinned_to_fp32()
    with Watch() as watch:
        model(torch.randn(4, 8)).sum().backward()
    # forward: the pinned product, then the free one; backward: two of the free one, then the weight's of the pinned
    assert watch.seen == ["ieee", "bf16", "bf16", "bf16", "ieee"]
    assert SWITCH.fp32_precision == "bf16"
    assert torch.get_float32_matmul_precision() == "medium"  # torch's older interface still agrees with its newer one


def test_nothing_is_held_where_the_process_agrees() -> None:
    assert is_set("cpu", "matmul", "ieee")
    with Watch() as watch:
        pinned_to_fp32()(torch.randn(4, 8)).sum().backward()
    assert set(watch.seen) == {"none"}
    assert is_set("meta", "matmul", "tf32")  # no switch to set


@pytest.mark.parametrize("op", ["matmul", "conv2d", "lstm"])
def test_each_kind_of_op_has_its_own_switch(op: str) -> None:
    switches = {"matmul": "matmul", "conv2d": "conv", "lstm": "rnn"}
    for device, backend in (("cpu", torch.backends.mkldnn), ("cuda", torch.backends.cudnn)):
        kind = switches[op]
        switch = torch.backends.cuda.matmul if (device, kind) == ("cuda", "matmul") else getattr(backend, kind)
        before = switch.fp32_precision
        wanted = "ieee" if before == "tf32" else "tf32"
        with holding(device, op, wanted):
            assert switch.fp32_precision == wanted
        assert switch.fp32_precision == before


def test_gradients_are_those_of_the_product() -> None:
    grads = []
    for compute in (torch.matmul, product):
        x, w = operands()
        out = compute(x, w)
        out.backward(torch.ones_like(out))
        grads.append([out.detach(), x.grad, w.grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_an_error_puts_it_back() -> None:
    x, w = operands()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        product(x, w.T)
    assert SWITCH.fp32_precision == "none"

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("in the backward")

    out = hold("cpu", "matmul", "tf32", lambda x, w: Fails.apply(x @ w), (x, w), {})
    with pytest.raises(ValueError, match="in the backward"):
        out.sum().backward()
    assert SWITCH.fp32_precision == "none"


def test_what_was_inherited_is_inherited_again() -> None:
    torch.backends.fp32_precision = "tf32"
    assert SWITCH.fp32_precision == "tf32"
    product(*operands(), precision="ieee").sum().backward()
    torch.backends.fp32_precision = "ieee"
    assert SWITCH.fp32_precision == "ieee"


def test_threads_take_turns() -> None:
    wrong: list[str] = []

    def work(precision: str) -> None:
        def run(x: Tensor, w: Tensor) -> Tensor:
            wrong.extend(precision for _ in range(20) if SWITCH.fp32_precision != precision)
            return x @ w

        for _ in range(50):
            hold("cpu", "matmul", precision, run, operands(), {}).sum().backward()

    threads = [threading.Thread(target=work, args=(p,)) for p in ("tf32", "bf16", "ieee")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert SWITCH.fp32_precision == "none"


def test_a_thread_that_agrees_with_the_process_waits_for_one_that_does_not() -> None:
    held, seen, stop = threading.Event(), [], threading.Event()

    def other() -> None:
        def run(x: Tensor, w: Tensor) -> Tensor:
            held.set()
            time.sleep(0.0002)
            return x @ w

        while not stop.is_set():
            hold("cpu", "matmul", "tf32", run, operands(), {})
            time.sleep(0.001)  # now nothing is held, and soon it will be

    def spy(x: Tensor, w: Tensor) -> Tensor:
        seen.append(SWITCH.fp32_precision)
        return x @ w

    thread = threading.Thread(target=other)
    thread.start()
    held.wait()
    action = gemm_action("matmul", Formats.all("fp32"), (), GemmSettings())
    for _ in range(50):
        action(spy, operands(), {}).sum().backward()
    stop.set()
    thread.join()
    assert set(seen) == {"ieee"}


def test_one_inside_another() -> None:
    seen = []

    def outer(x: Tensor, w: Tensor) -> Tensor:
        inner = hold("cpu", "matmul", "ieee", lambda a, b: seen.append(SWITCH.fp32_precision) or a @ b, (x, w), {})
        seen.append(SWITCH.fp32_precision)
        return inner

    hold("cpu", "matmul", "tf32", outer, operands(), {}).sum().backward()
    assert seen == ["ieee", "tf32"]
    assert SWITCH.fp32_precision == "none"


def test_a_graph_is_kept_as_long_as_its_caller_wants() -> None:
    x, w = operands()
    out = product(x, w).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * w.sum(1).expand(6, 8))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_each_product_as_it_ran(reentrant: bool) -> None:
    torch.set_float32_matmul_precision("medium")
    model, x = pinned_to_fp32(), torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    with Watch() as watch:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(plain, [p.grad for p in model.parameters()], strict=True))
    assert set(watch.seen) == {"bf16", "ieee"}
    # The free product's forward, that again where a checkpoint doesn't stop early, and its two gradients.
    assert watch.seen.count("bf16") == (4 if reentrant else 3)


def test_frozen_and_evaluated() -> None:
    x, w = operands()
    with torch.no_grad():
        assert not product(x, w).requires_grad
    out = product(x.detach(), w)
    out.sum().backward()
    assert w.grad is not None
    assert not product(x.detach(), w.detach()).requires_grad


def test_a_transform_is_refused() -> None:
    x, w = operands()
    with pytest.raises(BackendError, match=r"set fp32_precision='tf32' there"):
        torch.func.vmap(lambda row: product(row, w))(x)


def test_second_derivatives_are_refused() -> None:
    x, w = operands()
    (first,) = torch.autograd.grad(product(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, after the break
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own way
def test_compiled_code_stops_for_it() -> None:
    torch.set_float32_matmul_precision("medium")
    torch._dynamo.reset()
    compiled = torch.compile(pinned_to_fp32(), backend="eager")
    with Watch() as watch:
        compiled(torch.randn(4, 8)).sum().backward()
    assert sorted(watch.seen) == ["bf16", "bf16", "bf16", "ieee", "ieee"]


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", ["ieee", "tf32"])
def test_a_gpu_multiplies_as_the_plan_says_and_not_as_the_process_allows(allowed: str) -> None:
    switch, generator = torch.backends.cuda.matmul, torch.Generator().manual_seed(0)
    if torch.version.hip or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("has no TF32")
    x, grad = (torch.randn(256, 256, generator=generator).cuda() for _ in range(2))
    switch.fp32_precision = allowed
    errors = {}
    for name in ("fp32", "tf32"):
        layer = nn.Linear(256, 256, bias=False).cuda()
        rule = PlanRule(match=("*::linear",), formats=Formats.all(name))
        model = autoprec.convert(nn.Sequential(layer), plan=Plan(rules=(rule,)))
        leaf = x.clone().requires_grad_()
        output = model(leaf)
        output.backward(grad)
        assert leaf.grad is not None
        weight = layer.weight.detach().double()
        errors[name] = [(output - x.double() @ weight.T).norm() / output.norm()]
        errors[name] += [(leaf.grad - grad.double() @ weight).norm() / leaf.grad.norm()]
        assert switch.fp32_precision == allowed
    assert all(error < 1e-6 for error in errors["fp32"])
    assert all(1e-5 < error < 1e-3 for error in errors["tf32"])
