import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoprec
from autoprec.backends import LinearSpec, get_backend
from autoprec.errors import UsageError
from autoprec.graph.record import record
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.recipes import CurrentRecipe
from autoprec.tune.posing import score_pass
from autoprec.tune.posing.gradient_errors import group_gradient_errors
from autoprec.tune.posing.scores import score_sites
from autoprec.tune.space import role_formats

LOW = ("fp32", "bf16", "fp16")
BELOW = (*LOW, "mxfp8", "fp8_e4m3", "int8", "nvfp4")


def formats_of(choice: str) -> Formats:
    return role_formats(choice, "training")


def score(model, x, choices, loss=lambda out: out.square().mean(), **options):
    """Scores of one batch; ``choices`` may be a tuple, for all matrix products."""

    def compute(model):
        out = model(x)
        return loss(out[0] if isinstance(out, tuple) else out)

    if isinstance(choices, tuple):
        sites = record(model, compute, grad=True).sites.values()
        choices = {site.id: choices for site in sites if site.is_gemm}
    return score_sites(model, [compute], choices, formats_of, **options)


class Calls(nn.Module):
    """A module that calls a function with its parameters."""

    def __init__(self, call, **shapes):
        super().__init__()
        self.call = call
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1])))

    def forward(self, x):
        return self.call(self, x)


def heads(x):
    return x.view(2, 8, 2, 8).transpose(1, 2)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_a_score_is_the_error_of_the_backend_that_a_converted_model_runs():
    x, g = torch.randn(24, 32), torch.randn(24, 16)
    model = nn.Sequential(nn.Linear(32, 16))
    found = score(model, x, ("fp8_e4m3",), lambda out: (out * g).sum())["0"]["fp8_e4m3"]
    weight, bias = model[0].weight, model[0].bias
    spec = LinearSpec(formats=formats_of("fp8_e4m3"), recipe=CurrentRecipe(), output_dtype=torch.bfloat16)
    low = get_backend("emulated").linear(x.bfloat16(), weight, bias, spec)
    exact = F.linear(x, weight, bias)
    assert found.fisher == pytest.approx((g * (low.float() - exact)).square().sum().item(), rel=1e-5)
    grads = torch.autograd.grad(low, (weight, bias), g.bfloat16()), torch.autograd.grad(exact, (weight, bias), g)
    error = sum(float((a - b).square().sum()) for a, b in zip(*grads, strict=True))
    assert found.weight_grad == pytest.approx(error, rel=1e-5)
    assert found.basis == "gradient"


def test_harms_are_sums_over_medians_and_fp32_has_none():
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    found = score(model, torch.randn(64, 16).requires_grad_(), BELOW)
    rows = [s for by_choice in found.values() for c, s in by_choice.items() if c != "fp32"]
    middle = len(rows) // 2
    parts = [sorted(values) for values in zip(*((s.fisher, s.weight_grad, s.input_grad) for s in rows), strict=True)]
    scales = [(values[middle] + values[~middle]) / 2 for values in parts]
    for by_choice in found.values():
        reference = by_choice["fp32"]
        assert (reference.fisher, reference.weight_grad, reference.input_grad, reference.harm) == (0, 0, 0, 0)
    for s in rows:
        values = (s.fisher, s.weight_grad, s.input_grad)
        assert s.harm == pytest.approx(sum(v / scale for v, scale in zip(values, scales, strict=True)))


def test_wider_formats_have_less_harm_at_every_site():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    for by_choice in score(model, torch.randn(128, 32), BELOW).values():
        harms = [by_choice[name].harm for name in ("fp32", "fp16", "bf16", "fp8_e4m3", "nvfp4")]
        assert harms == sorted(harms)
        assert len(set(harms)) == len(harms)


#: An identity layer, a layer, and the shape of the input.
IDENTITY = {
    "more rows than features": (lambda: (nn.Linear(16, 16, bias=False), nn.Linear(16, 8)), (40, 16)),
    "fewer": (lambda: (nn.Linear(16, 16, bias=False), nn.Linear(16, 8)), (5, 16)),
    "channels": (lambda: (nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 6, 3)), (3, 4, 8, 8)),
    "channels of a line": (lambda: (nn.Conv1d(4, 4, 1, bias=False), nn.ConvTranspose1d(4, 6, 3)), (3, 4, 8)),
}


@pytest.mark.parametrize("name", IDENTITY)
def test_the_gradient_passed_on_is_scored_as_an_identity_layer_before_would_see_it(name):
    make, shape = IDENTITY[name]
    (before, layer), x = make(), torch.randn(shape)
    with torch.no_grad():
        before.weight.copy_(torch.eye(len(before.weight)).view_as(before.weight))
    model = nn.Sequential(before, layer)
    g = torch.randn_like(model(x))
    found = score(model, x, {"1": ("bf16",)}, lambda out: (out * g).sum())["1"]["bf16"]
    rules = (PlanRule(match=("1",), formats=formats_of("bf16")), PlanRule(match=("*::*",), formats=formats_of("fp32")))
    alone = group_gradient_errors(model, [lambda m: (m(x) * g).sum()], {"": Plan(rules=rules)})[""]
    assert found.input_grad > 0
    assert found.weight_grad + found.input_grad == pytest.approx(alone.gradient, rel=1e-3)


def test_an_input_that_takes_no_gradient_has_none_to_pass_on():
    model, x = nn.Linear(16, 4), torch.randn(8, 16)
    assert score(model, x, ("bf16",))[""]["bf16"].input_grad == 0
    assert score(model, x.requires_grad_(), ("bf16",))[""]["bf16"].input_grad > 0


def test_small_gradients_that_int8_rounds_to_zero_in_every_row_add_up():
    torch.manual_seed(0)
    model, x = nn.Linear(16, 16), torch.randn(256, 1).expand(256, 16).clone().requires_grad_()
    g = 1e-3 * torch.ones(256, 16)  # below half a step of the scale that the one large number sets
    g[0, 0] = 1.0
    found = score(model, x, ("int8", "bf16"), lambda out: (out * g).sum())[""]
    assert found["int8"].input_grad > 1e3 * found["bf16"].input_grad


def test_the_gradients_format_counts_and_only_in_the_gradients():
    model = nn.Linear(32, 16)
    formats = {
        "e5m2 gradient": Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2"),
        "e4m3 gradient": Formats.all("fp8_e4m3"),
    }
    x = torch.randn(64, 32, requires_grad=True)
    found = score_sites(model, [lambda m: m(x).square().mean()], {"": tuple(formats)}, formats.__getitem__)[""]
    coarse, fine = found["e5m2 gradient"], found["e4m3 gradient"]
    assert coarse.fisher == fine.fisher
    assert coarse.weight_grad > 1.5 * fine.weight_grad
    assert coarse.input_grad > 1.5 * fine.input_grad


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)


#: Module, shape of its input, and whether the product has a weight.
PRODUCTS = {
    "linear": (lambda: nn.Linear(16, 4), (2, 8, 16), True),
    "functional linear": (lambda: Calls(lambda m, x: F.linear(x, m.w), w=(4, 16)), (8, 16), True),
    "conv": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8), True),
    "transposed conv": (lambda: nn.ConvTranspose1d(3, 4, 3), (2, 3, 8), True),
    "matmul with a view of a weight": (lambda: Calls(lambda m, x: x @ m.w.T, w=(4, 16)), (8, 16), True),
    "attention by hand": (lambda: Calls(lambda m, x: (x @ x.mT).softmax(-1) @ x), (2, 8, 16), False),
    "experts": (lambda: Calls(lambda m, x: torch.einsum("td,edf->etf", x, m.w), w=(3, 16, 4)), (8, 16), True),
    "one expert": (lambda: Calls(lambda m, x: torch.mm(x, m.w[1]), w=(3, 16, 4)), (8, 16), True),
    "baddbmm": (
        lambda: Calls(lambda m, x: torch.baddbmm(m.b, x, m.w), b=(2, 8, 4), w=(2, 16, 4)),
        (2, 8, 16),
        True,
    ),
    "attention": (
        lambda: Calls(lambda m, x: F.scaled_dot_product_attention(heads(x), heads(x * 2), heads(x), is_causal=True)),
        (2, 8, 16),
        False,
    ),
    "multi-head attention": (MultiHead, (2, 8, 16), True),
    "lstm": (lambda: nn.LSTM(16, 8, num_layers=2, batch_first=True), (2, 8, 16), True),
    "gru": (lambda: nn.GRU(16, 8), (8, 2, 16), True),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_kind_of_product_is_scored_under_its_recorded_name(name):
    make, shape, has_weight = PRODUCTS[name]
    found = score(make(), torch.randn(shape).requires_grad_(), LOW)
    assert found
    for site, by_choice in found.items():
        bf16, fp16 = by_choice["bf16"], by_choice["fp16"]
        assert (bf16.basis, fp16.basis) == ("gradient", "gradient"), site
        assert bf16.fisher > 4 * fp16.fisher > 0
        assert bf16.input_grad > 4 * fp16.input_grad > 0
        assert (bf16.weight_grad > 0) == has_weight


def test_a_site_called_twice_sums_both_calls():
    shared, x = nn.Linear(16, 16), torch.randn(32, 16)
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    for layer in (first, second):
        layer.load_state_dict(shared.state_dict())
    both = score(nn.Sequential(shared, nn.ReLU(), shared), x, ("bf16",))["0"]["bf16"]
    apart = score(nn.Sequential(first, nn.ReLU(), second), x, ("bf16",))
    assert both.fisher == pytest.approx(apart["0"]["bf16"].fisher + apart["2"]["bf16"].fisher)
    assert both.weight_grad == pytest.approx(apart["0"]["bf16"].weight_grad + apart["2"]["bf16"].weight_grad)


def test_scores_are_means_over_batches():
    model, batches = nn.Linear(16, 4), [torch.randn(32, 16) for _ in range(3)]
    losses = [lambda m, x=x: m(x).square().mean() for x in batches]
    together = score_sites(model, losses, {"": ("bf16",)}, formats_of)[""]["bf16"]
    apart = [score_sites(model, [loss], {"": ("bf16",)}, formats_of)[""]["bf16"] for loss in losses]
    assert together.fisher == pytest.approx(sum(s.fisher for s in apart) / 3)
    assert together.weight_grad == pytest.approx(sum(s.weight_grad for s in apart) / 3)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    model[3].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    random_state = torch.get_rng_state()
    score(model, torch.randn(32, 16, generator=torch.Generator().manual_seed(1)), BELOW)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    assert [type(module) for module in model.modules()] == classes
    assert [module.training for module in model.modules()] == [True, True, True, True, False]


def test_a_model_frozen_as_a_whole_is_scored_for_inference_and_stays_frozen():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).requires_grad_(False)
    found = score(model, torch.randn(32, 16), BELOW, mode="inference")
    for by_choice in found.values():
        assert by_choice["nvfp4"].fisher > by_choice["bf16"].fisher > 0
        assert {(s.weight_grad, s.input_grad) for s in by_choice.values()} == {(0.0, 0.0)}
        assert by_choice["bf16"].basis == "gradient"
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


def test_a_frozen_layer_has_no_weight_gradient_to_lose():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    model[1].requires_grad_(False)
    found = score(model, torch.randn(32, 16), ("bf16",))
    assert found["0"]["bf16"].weight_grad > 0
    assert found["1"]["bf16"].weight_grad == 0 < found["1"]["bf16"].fisher


class Rotary(nn.Module):
    """Angles by a product that no gradient reaches; positions above 256 aren't exact in bf16."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([[1.0, 0.1, 0.01, 0.001]]))
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        with torch.no_grad():
            angles = torch.arange(1.0, 600.0, 40.0)[:, None] @ self.frequencies
        return self.layer(torch.cat([x * angles.cos(), x * angles.sin()], -1))


def test_a_product_that_no_gradient_reaches_is_scored_by_what_it_does_alone():
    found = score(Rotary(), torch.randn(15, 4), ("fp32", "bf16"))
    angles, layer = found["::matmul#0"], found["layer"]
    assert (angles["bf16"].basis, layer["bf16"].basis) == ("alone", "gradient")
    assert angles["bf16"].harm > 10 * layer["bf16"].harm
    assert angles["fp32"].harm == 0


def test_arguments_that_are_overwritten_before_the_gradient_comes_are_noticed():
    def overwrite(m, x):
        y = x * 1.0
        with torch.no_grad():
            frozen = m.w.detach()
        out = F.linear(y, frozen)
        y.zero_()
        return out * m.scale

    model = Calls(overwrite, w=(4, 16), scale=(4,))
    found = score(model, torch.randn(8, 16).requires_grad_(), ("bf16",))["::linear#0"]["bf16"]
    assert found.basis == "alone"
    assert found.fisher > 0


def test_a_call_that_cannot_be_made_again_is_scored_alone(monkeypatch):
    def refuse(*args):
        raise RuntimeError("the kernel can't be called on its own")

    monkeypatch.setattr(score_pass, "Replay", refuse)
    found = score(nn.Linear(16, 4), torch.randn(8, 16), ("fp32", "bf16"))[""]
    assert found["bf16"].basis == "alone"
    assert found["bf16"].fisher > 0 == found["fp32"].fisher


def test_running_out_of_memory_is_no_score(monkeypatch):
    def exhaust(*args):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(score_pass.Replay, "errors", exhaust)
    with pytest.raises(torch.OutOfMemoryError):
        score(nn.Linear(16, 4), torch.randn(8, 16), ("bf16",))


def test_a_result_changed_in_place_keeps_its_own_gradient():
    x = torch.randn(8, 16)
    plain = score(Calls(lambda m, x: F.relu(F.linear(x, m.w)), w=(4, 16)), x, ("bf16",))
    torch.manual_seed(0)
    model = Calls(lambda m, x: F.linear(x, m.w).relu_(), w=(4, 16))
    model.load_state_dict({"w": torch.zeros(4, 16)})
    with torch.no_grad():
        model.w.copy_(torch.linspace(-1, 1, 64).view(4, 16))
    other = Calls(lambda m, x: F.relu(F.linear(x, m.w)), w=(4, 16))
    other.load_state_dict(model.state_dict())
    assert score(model, x, ("bf16",)) == score(other, x, ("bf16",))
    assert plain["::linear#0"]["bf16"].basis == "gradient"


def test_a_loss_without_a_gradient_leaves_the_error_of_the_output():
    model, x = nn.Linear(16, 4), torch.randn(32, 16)
    found = score(model, x, ("bf16",), lambda out: (out.argmax(-1) == 0).float().mean(), mode="inference")[""]["bf16"]
    exact = model(x)
    error = model.bfloat16()(x.bfloat16()).float() - exact
    assert found.basis == "output"
    assert found.fisher == pytest.approx((error.square().sum() / exact.square().sum()).item(), rel=1e-4)


class Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("this kernel has no backward")


def test_a_model_without_a_backward_is_scored_by_outputs_in_inference_alone(caplog):
    model, x = Calls(lambda m, x: Forward.apply(F.linear(x, m.w)), w=(4, 16)), torch.randn(8, 16)
    found = score(model, x, {"::linear#0": ("bf16",)}, mode="inference")["::linear#0"]["bf16"]
    assert found.basis == "output"
    assert 0 < found.fisher < 1e-4
    assert "no backward" in caplog.text
    with pytest.raises(RuntimeError, match="no backward"):
        score(model, x, {"::linear#0": ("bf16",)})


def test_recurrent_layers_in_evaluation_run_in_kernels_that_have_a_backward():
    seen, before = [], torch.backends.cudnn.enabled

    def loss(out):
        seen.append(torch.backends.cudnn.enabled)
        return out.square().mean()

    model, x = nn.LSTM(16, 8).eval(), torch.randn(8, 2, 16)
    score(model, x, {"": ("bf16",)}, loss, mode="inference")
    assert not any(seen)
    assert torch.backends.cudnn.enabled == before


def test_a_site_that_the_batches_do_not_call_says_so():
    found = score(nn.Linear(16, 4), torch.randn(8, 16), {"": ("bf16",), "elsewhere": ("bf16",)})
    assert found["elsewhere"]["bf16"].basis == "uncalled"
    assert found["elsewhere"]["bf16"].harm == 0


@pytest.mark.parametrize("name", ["attention", "lstm"])
def test_dropout_inside_a_kernel_is_no_error_of_a_format(name):
    def attend(m, x):
        return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), dropout_p=0.9)

    model = Calls(attend) if name == "attention" else nn.LSTM(16, 8, num_layers=2, dropout=0.9)
    x = torch.randn(2, 8, 16).requires_grad_()
    by_choice = next(iter(score(model, x, LOW).values()))
    # errors of draws would be of the size of the result, in both formats
    assert by_choice["bf16"].fisher > 4 * by_choice["fp16"].fisher


def test_fp16_gradients_are_scaled_as_a_loss_scaler_would():
    model, x = nn.Linear(16, 4), torch.randn(32, 16)
    plain = score(model, x, LOW, lambda out: out.square().mean())[""]
    tiny = score(model, x, LOW, lambda out: out.square().mean() * 2.0**-17)[""]  # below fp16's range, unscaled
    assert tiny["fp16"].weight_grad / tiny["bf16"].weight_grad == pytest.approx(
        plain["fp16"].weight_grad / plain["bf16"].weight_grad, rel=0.2
    )


def test_values_beyond_a_format_have_infinite_harm_and_leave_the_others_alone():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    found = score(model, torch.randn(8, 16), LOW)
    assert found["0"]["fp16"].harm == math.inf
    assert math.isfinite(found["0"]["bf16"].harm)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_scored_once(reentrant):
    class Block(nn.Module):
        def __init__(self, is_checkpointed):
            super().__init__()
            torch.manual_seed(1)
            self.inner = nn.Linear(16, 16)
            self.is_checkpointed = is_checkpointed

        def body(self, x):
            return F.gelu(self.inner(x)) @ self.inner.weight

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=reentrant) if self.is_checkpointed else self.body(x)

    x = torch.randn(8, 16).requires_grad_()
    assert score(Block(True), x, ("bf16",)) == score(Block(False), x, ("bf16",))


def test_a_gradient_penalty_of_the_loss_is_not_taken_for_its_gradient():
    model, x = nn.Linear(16, 4), torch.randn(32, 16)

    def penalised(out):
        if out.requires_grad:
            torch.autograd.grad(out.sum() * 1e3, model.weight, retain_graph=True)
        return out.square().mean()

    assert score(model, x, ("bf16",), penalised) == score(model, x, ("bf16",))


def test_the_recipe_counts():
    model, x = nn.Linear(64, 16), torch.randn(64, 64)
    plain = {"recipe": "nvfp4", "hadamard": False, "stochastic_rounding": False}
    first = score(model, x, ("nvfp4",), recipe={"nvfp4": plain})[""]["nvfp4"]
    second = score(model, x, ("nvfp4",), recipe={"nvfp4": {**plain, "weight_2d": False}})[""]["nvfp4"]
    assert first.fisher != second.fisher


def test_sums_order_whole_models_and_bf16_is_the_least_after_fp16():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    found = score(model, torch.randn(256, 32), BELOW)
    whole = {choice: sum(by_choice[choice].harm for by_choice in found.values()) for choice in BELOW}
    assert whole["fp32"] == 0
    assert sorted(whole, key=whole.get)[:3] == ["fp32", "fp16", "bf16"]
    assert whole["bf16"] < 0.5 * min(whole[c] for c in BELOW if c not in LOW)


def test_what_cannot_be_scored_is_refused():
    model, x = nn.Sequential(nn.Linear(16, 4), nn.ReLU()), torch.randn(8, 16)
    with pytest.raises(UsageError, match="no matrix product"):
        score(model, x, {"1::relu#0": ("bf16",), "1": ("bf16",)})
    with pytest.raises(UsageError, match="one number"):
        score(model, x, {"0": ("bf16",)}, lambda out: out.sum(0))
    with pytest.raises(UsageError, match="at least one"):
        score_sites(model, [], {"0": ("bf16",)}, formats_of)
    plan = Plan(rules=(PlanRule(match=("*",), formats=Formats.all("bf16")),))
    with pytest.raises(UsageError, match="revert"):
        score(autoprec.convert(model, plan=plan), x, {"0": ("bf16",)})
