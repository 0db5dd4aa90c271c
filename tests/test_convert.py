"""convert, receipt and revert: levels, modes, and what stays as it was."""

import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autoprec
from autoprec.errors import ConversionError, PlanMismatchError, UsageError
from autoprec.plan import Formats, Plan, PlanRule

BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(d, 2 * d), nn.LayerNorm(2 * d), nn.Linear(2 * d, d)
        self.w = nn.Parameter(torch.randn(d, d) / 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += 1
        return torch.softmax(self.b(torch.relu(self.norm(self.a(x)))) @ self.w, -1)


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def batch(seed=1, rows=4):
    torch.manual_seed(seed)
    return torch.randn(rows, 8)


def convert(model, example_inputs=None, **options):
    return autoprec.convert(model, options.pop("target", "a100"), example_inputs, **options)


def close(got, want, tolerance=0.02):
    return (got - want).norm() < tolerance * want.norm()


class Products(TorchDispatchMode):
    """Dtypes of the matrix products below autograd, and the number of casts to 16 bit."""

    def __init__(self):
        super().__init__()
        self.dtypes, self.casts = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(func).startswith(("aten.mm", "aten.addmm", "aten.bmm")):
            self.dtypes += [a.dtype for a in args if isinstance(a, torch.Tensor)]
        self.casts += str(func).startswith("aten._to_copy") and kwargs.get("dtype") in (BF16, torch.float16)
        return func(*args, **kwargs)


def products(model, *args):
    with Products() as seen:
        model(*args)
    return seen


# ---- what the user holds


def test_the_model_stays_the_same_object_to_its_user():
    model = net()
    parameters, keys, text = list(model.parameters()), list(model.state_dict()), repr(model)
    assert convert(model) is model
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert type(model).__module__ == Net.__module__
    assert isinstance(model.a, nn.Linear)
    assert repr(model) == text
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_a_copy_leaves_the_model_alone():
    model = net()
    attributes, want = set(vars(model)), model(batch())
    copied = convert(model, inplace=False)
    assert copied is not model
    assert type(model) is Net
    assert set(vars(model)) == attributes
    assert torch.equal(model(batch()), want)
    assert set(products(copied, batch()).dtypes) == {BF16}


def state(model):
    return {
        name: (type(module), {k: v for k, v in vars(module).items() if not k.startswith("_")}, set(vars(module)))
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_revert_is_bit_exact(level, mode):
    model = net()
    model.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    before = state(model)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        want = net()(batch())
    convert(model, level=level, mode=mode)
    model(batch()).float().sum().backward()
    assert autoprec.revert(model) is model
    after = state(model)
    assert after.keys() == before.keys()
    for name, (cls, public, attributes) in before.items():
        assert after[name][0] is cls
        assert after[name][2] == attributes
        assert after[name][1].keys() == public.keys()
        assert all(after[name][1][k] is v for k, v in public.items()), name
    for name, value in values.items():
        if name != "steps":
            assert torch.equal(model.state_dict()[name], value), name
    with torch.no_grad():
        assert torch.equal(model(batch()), want)


def test_reverting_what_isnt_converted_does_nothing():
    model = net()
    assert autoprec.revert(model) is model
    assert type(model) is Net


def test_converting_again_replaces_the_plan():
    model = convert(net())
    convert(model, target="v100")
    assert set(products(model, batch()).dtypes) == {torch.float16}
    convert(model, level="O0")
    assert set(products(model, batch()).dtypes) == {torch.float32}
    autoprec.revert(model)
    assert type(model) is Net


def test_a_reverted_model_is_freed():
    model = convert(net())
    model(batch()).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_optimizer_built_before_conversion_stays_valid(level):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    convert(model, level=level)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch()).float(), torch.full((4, 8), 0.125))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_state_dict_goes_to_the_original_and_back(level):
    model = convert(net(), level=level)
    plain = net(seed=5)
    plain.load_state_dict(model.state_dict())
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    assert close(plain(batch()), model(batch()).float())
    other = convert(net(seed=7), level=level)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other(batch()), model(batch()))


# ---- levels


def test_o0_is_the_model_itself():
    model, plain = convert(net(), level="O0"), net()
    got, want = model(batch()), plain(batch())
    assert torch.equal(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_an_empty_plan_is_the_model_itself():
    model = autoprec.convert(net(), plan=Plan(rules=()))
    assert torch.equal(model(batch()), net()(batch()))


def test_o1_keeps_fp32_parameters_and_gradients():
    model = convert(net())
    model(batch()).sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_o2_stores_16_bit_but_for_norms_and_steps_on_fp32_masters():
    model = convert(net(), level="O2")
    assert {name: p.dtype for name, p in model.named_parameters()} == {
        "w": BF16, "a.weight": BF16, "a.bias": BF16, "b.weight": BF16, "b.bias": BF16,
        "norm.weight": torch.float32, "norm.bias": torch.float32,
    }  # fmt: skip
    assert model(batch()).dtype == torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    start = model.w.detach().clone()
    for _ in range(400):  # each step is far below half a bf16 step of the weight
        model.w.grad = torch.ones_like(model.w)
        optimizer.step()
        assert model.w.dtype == BF16
    assert torch.allclose(start.float() - model.w.float(), torch.tensor(0.04), atol=0.01)


def test_o3_stores_16_bit_and_returns_it():
    model = convert(net(), level="O3")
    assert {p.dtype for p in model.parameters()} == {BF16}
    assert model(batch()).dtype == torch.float32  # softmax is fp32 by rule, and nothing casts outputs at O3
    assert convert(nn.Sequential(nn.Linear(4, 4)), level="O3")(torch.randn(2, 4)).dtype == BF16


def test_o2_takes_weights_written_from_outside():
    model = convert(net(), level="O2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        model.w.fill_(0.5)
    model.w.grad = torch.zeros_like(model.w)
    optimizer.step()
    assert torch.equal(model.w, torch.full_like(model.w, 0.5))
    autoprec.revert(model)
    assert torch.equal(model.w, torch.full((8, 8), 0.5))


def test_o2_revert_gives_the_trained_masters():
    model = convert(net(), level="O2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    exact = net().w.detach()
    model.w.grad = torch.full_like(model.w, 2.0**-12)
    optimizer.step()
    autoprec.revert(model)
    assert torch.equal(model.w, exact - 2.0**-12)


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_at_o2_keeps_its_masters(carry):
    model = carry(convert(net(), level="O2"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    start = model.w.detach().clone()
    for _ in range(400):
        model.w.grad = torch.ones_like(model.w)
        optimizer.step()
    assert torch.allclose(start.float() - model.w.float(), torch.tensor(0.04), atol=0.01)


# ---- inference


def casts_of(model):
    with torch.no_grad():
        return products(model, batch()).casts


def test_inference_casts_each_weight_once():
    model, training = convert(net(), mode="inference"), convert(net())
    first, second = casts_of(model), casts_of(model)
    assert first == casts_of(training)
    assert second == first - 5
    with torch.no_grad():
        assert torch.equal(model(batch()), training(batch()))


def test_kept_casts_follow_their_weight():
    model = convert(net(), mode="inference")
    with torch.no_grad():
        before = model(batch())
        model.w.mul_(2.0)
        assert not torch.equal(model(batch()), before)
        model.w.data = model.w.data / 2.0
        assert torch.equal(model(batch()), before)
        model.load_state_dict(net(seed=3).state_dict())
        assert torch.equal(model(batch()), convert(net(seed=3))(batch()))


def test_inference_mode_loses_no_gradient():
    model, training = convert(net(), mode="inference"), convert(net())
    with torch.no_grad():
        model(batch())
    for m in (model, training):
        m(batch()).square().sum().backward()
    for p, q in zip(model.parameters(), training.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_memory_of_kept_casts_is_said():
    model = convert(net(), batch(), mode="inference")
    notes = " ".join(autoprec.receipt(model).notes)
    assert "bytes" in notes
    with torch.no_grad():
        model(batch())
    cast = [p for name, p in model.named_parameters() if "norm" not in name]
    assert autoprec.receipt(model).extra_bytes == sum(2 * p.numel() for p in cast)
    autoprec.revert(model)
    model(batch())


@pytest.mark.parametrize("compiled", [False, True])
def test_inference_under_inference_mode(compiled):
    model = convert(net(), mode="inference")
    want = convert(net())(batch())
    call = torch.compile(model, backend="eager") if compiled else model
    with torch.inference_mode():
        assert torch.equal(call(batch()), want)
        assert torch.equal(call(batch()), want)
    torch.compiler.reset()


# ---- plans and the receipt


def test_a_plan_addresses_the_second_call_of_an_op():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return (x @ self.w) @ self.w

    low = PlanRule(match=("*::matmul", "::matmul"), formats=Formats.all("bf16"))
    second = PlanRule(match=("::matmul#1",), formats=Formats.all("fp32"))
    model = autoprec.convert(Twice(), plan=Plan(rules=(second, low)))
    x = torch.randn(2, 4)
    for call in (model, model.forward, copy.deepcopy(model)):
        assert products(call, x).dtypes == [BF16, BF16, torch.float32, torch.float32]
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
    torch.compiler.reset()


def test_the_last_gradients_are_those_of_the_plan():
    """The k-th call is counted afresh when a checkpoint recomputes it."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return torch.tanh(x @ self.w) @ self.w

    low = PlanRule(match=("*::matmul", "::matmul"), formats=Formats.all("bf16"))
    second = PlanRule(match=("::matmul#1",), formats=Formats.all("fp32"))
    torch.manual_seed(0)
    model = autoprec.convert(Body(), plan=Plan(rules=(second, low)))
    x = torch.randn(2, 4)
    model(x).square().sum().backward()
    want, model.w.grad = model.w.grad, None
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().sum().backward()
    assert torch.equal(model.w.grad, want)


def test_a_plan_addresses_modules_by_glob():
    keep = PlanRule(match=("a",), formats=Formats.all("fp32"))
    low = PlanRule(match=("*",), formats=Formats.all("bf16"))
    model = autoprec.convert(net(), plan=Plan(rules=(keep, low)))
    assert products(model, batch()).dtypes[:3] == [torch.float32] * 3
    assert set(products(model, batch()).dtypes[3:]) == {BF16}


def test_receipt_says_what_was_asked_and_got():
    model = convert(net(), batch())
    receipt = autoprec.receipt(model)
    assert receipt.recorded
    assert receipt.low_precision_share == 1.0
    assert (receipt["a"].asked, receipt["a"].got) == ("bf16", "bf16")
    assert receipt["::matmul#0"].got == "bf16"
    assert receipt["::softmax#0"].got == "fp32"
    assert not receipt.refused


def test_recording_leaves_no_trace():
    model = net()
    model.norm = nn.BatchNorm1d(16)
    model.drop = nn.Dropout(0.5)
    before = copy.deepcopy(model.state_dict())
    x, generator = batch(), torch.get_rng_state()
    convert(model, x)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def test_an_fp64_site_is_refused_aloud(caplog):
    def build():
        return nn.Sequential(nn.Linear(4, 4)).double()

    plan = Plan(rules=(PlanRule(match=("*",), formats=Formats.all("bf16"), reason="asked"),))
    x = torch.randn(2, 4, dtype=torch.float64)
    with caplog.at_level(logging.WARNING, "autoprec"):
        model = autoprec.convert(build(), example_inputs=x, plan=plan)
    assert "0" in caplog.text
    assert [row.site for row in autoprec.receipt(model).refused] == ["0"]
    assert autoprec.receipt(model).low_precision_share == 0.0
    model = build()
    with pytest.raises(ConversionError, match="strict"):
        autoprec.convert(model, example_inputs=x, plan=plan, strict=True)
    assert type(model[0]) is nn.Linear


def test_a_failing_example_leaves_the_model_unconverted():
    model = net()
    with pytest.raises(Exception, match=r"shape|size|mat1"):
        convert(model, torch.randn(3, 5))
    assert type(model) is Net
    assert torch.equal(model(batch()), net()(batch()))


def test_a_plan_of_another_model_is_refused():
    plan = convert(net())._autoprec_conversion.plan
    other = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(PlanMismatchError):
        autoprec.convert(other, plan=plan)
    assert type(other) is nn.Sequential


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (lambda: 3, {}, "torch.nn.Module"),
        (net, {"level": "O5"}, "O0, O1, O2, O3"),
        (net, {"mode": "test"}, "training, inference"),
        (net, {"formats": "int2"}, "int2"),
    ],
)
def test_wrong_arguments_are_named(model, options, says):
    with pytest.raises(UsageError, match=says):
        convert(model(), **options)


def test_receipt_of_a_plain_model_is_an_error():
    with pytest.raises(UsageError, match="isn't converted"):
        autoprec.receipt(net())


# ---- fp16 and scaling


def test_fp16_trains_with_the_plans_scaler():
    model = convert(net(), target="v100")
    plan = model._autoprec_conversion.plan
    assert plan.scaler.enabled
    scaler = plan.grad_scaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch()), torch.arange(4))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_gradients_are_within_the_formats_error_of_fp32():
    for target, tolerance in (("a100", 0.05), ("v100", 0.01)):
        model, plain = convert(net(), target=target), net()
        for m in (model, plain):
            m(batch()).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert close(p.grad, q.grad, tolerance), (target, name)


def test_double_backward():
    model, plain = convert(net()), net()
    penalties = []
    for m in (model, plain):
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        penalties.append((gradient.detach(), m.w.grad))
    assert close(penalties[0][0], penalties[1][0], 0.05)
    assert close(penalties[0][1], penalties[1][1], 0.1)
