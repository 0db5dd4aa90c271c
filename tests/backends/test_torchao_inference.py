"""torchao's tensors for inference: within their format's bounds, of the present weight, never in its place."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.backends import LinearSpec, choose, get_backend
from autoprec.backends.torchao_weights import HeldWeights, Kind, group_of, quantize
from autoprec.errors import BackendError
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.recipes import CurrentRecipe, Recipe, RowwiseRecipe

TENSOR, ROW = CurrentRecipe(), RowwiseRecipe(power_of_two=False)
OUT, IN = 48, 256
#: Of activation and weight.
PAIRS = {"int8": ("int8", "int8"), "int8 weight": ("bf16", "int8"), "int4 weight": ("bf16", "int4")}
PAIRS["fp8 weight"] = ("bf16", "fp8_e4m3")


def formats(pair: str) -> Formats:
    activation, weight = PAIRS[pair]
    return Formats(input=activation, weight=weight, grad_output="bf16")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameter(out: int = OUT, width: int = IN) -> nn.Parameter:
    return nn.Parameter(draw(out, width, seed=1, dtype=torch.float32) * width**-0.5)


def infer(pair: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: Recipe = ROW) -> Tensor:
    """What the backend gives, or a skip with its own reason."""
    backend, reason = choose("linear", formats(pair), x, weight, ("torchao",), "inference", recipe=recipe)
    if backend is None:
        pytest.skip(reason)
    with torch.no_grad():
        return backend.linear(x, weight, bias, LinearSpec(formats=formats(pair), recipe=recipe, mode="inference"))


def refusal(pair: str, x: Tensor, weight: Tensor, recipe: Recipe = ROW, mode: Any = "inference") -> str:
    backend, reason = choose("linear", formats(pair), x, weight, ("torchao",), mode, recipe=recipe)
    assert backend is None
    return reason


def half_step(x: Tensor, name: str, rowwise: bool) -> Tensor:
    """The most that rounding to the format moves each number, scales included."""
    size = x.abs()
    amax = size.amax(1, keepdim=True) if rowwise else size.amax()
    if name == "int8":  # 255 steps from minus to plus the largest
        return (amax / 255 * 1.001).expand_as(x)
    if name == "fp8_e4m3":  # 3 bits of mantissa; below 2 ** -6 of a scale that ends at 448, steps of 2 ** -9
        return size * 2.0**-4 + amax / 448 * 2.0**-10 + size * 2.0**-7
    if name == "int4":  # 15 steps from the smallest to the largest of a group, which bf16 holds, as it does their ends
        groups = x.reshape(x.shape[0], -1, group_of(x.shape[1]) or 0)
        step = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15
        ends = groups.abs().amax(2, keepdim=True) * 3 * 2.0**-8
        return (0.6 * step + ends).expand_as(groups).reshape(x.shape)
    return size * 0


def assert_within_format(got: Tensor, pair: str, x: Tensor, weight: Tensor, recipe: Recipe) -> None:
    activation, name = PAIRS[pair]
    rows, w = x.double().reshape(-1, x.shape[-1]), weight.detach().double()
    rowwise = recipe is ROW
    dx, dw = half_step(rows, activation, rowwise), half_step(w, name, rowwise)
    wanted = rows @ w.T
    bound = rows.abs() @ dw.T + dx @ w.abs().T + dx @ dw.T
    bound += 2.0**-22 * (rows.abs() @ w.abs().T) + 2 * torch.finfo(got.dtype).eps * (wanted.abs() + bound)
    error = (got.double().reshape(wanted.shape) - wanted).abs()
    assert (error <= bound).all()
    assert error.max() > 0  # it was rounded


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", [TENSOR, ROW], ids=["current", "rowwise"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_product_is_as_near_as_the_format_allows(
    pair: str, recipe: Recipe, dtype: torch.dtype, device: str
) -> None:
    x, weight = draw(2, 5, IN, dtype=dtype).to(device), nn.Parameter(parameter().detach().to(device))
    got = infer(pair, x, weight, recipe=recipe)
    assert (got.shape, got.dtype) == ((2, 5, OUT), dtype)
    assert_within_format(got, pair, x, weight, recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [TENSOR, ROW], ids=["current", "rowwise"])
def test_fp8_by_fp8_on_a_gpu(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAIRS, "fp8", ("fp8_e4m3", "fp8_e4m3"))
    x, weight = draw(40, IN).cuda(), nn.Parameter(parameter().detach().cuda())
    x[3] = 0  # a token of zeros isn't NaN
    assert_within_format(infer("fp8", x, weight, recipe=recipe), "fp8", x, weight, recipe)


@pytest.mark.parametrize(("width", "group"), [(128, 128), (192, 64), (96, 32), (80, None)])
def test_int4_groups_are_the_largest_that_fit(width: int, group: int | None) -> None:
    assert group_of(width) == group
    x, weight = draw(4, width), parameter(32, width)
    if group is None:  # torchao would leave such a weight as it is, with a message in a log
        assert "in_features=80 isn't a multiple of 32" in refusal("int4 weight", x, weight)
        return
    assert_within_format(infer("int4 weight", x, weight), "int4 weight", x, weight, ROW)
    _, reason = choose("linear", formats("int4 weight"), x, weight, ("torchao",), "inference", recipe=ROW)
    assert reason.endswith(f"torchao's int4 weight, one scale for {group} numbers")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (2, 3, 5, IN), (0, IN), (2, 0, IN)])
def test_any_shape_of_input(pair: str, shape: tuple[int, ...]) -> None:
    x, weight = draw(*shape), parameter()
    infer(pair, draw(4, IN), weight)  # asked with rows; an expert may get none at a later call
    backend, spec = get_backend("torchao"), LinearSpec(formats=formats(pair), recipe=ROW, mode="inference")
    with torch.no_grad():
        got = backend.linear(x, weight, torch.ones(OUT), spec)
    assert got.shape == (*shape[:-1], OUT)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_bias_is_added_and_an_outer_autocast_changes_nothing(pair: str) -> None:
    x, weight, bias = draw(5, IN), parameter(), draw(OUT, dtype=torch.float32)
    with_bias = infer(pair, x, weight, bias)
    torch.testing.assert_close(with_bias.float(), infer(pair, x, weight).float() + bias, rtol=0.01, atol=0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(infer(pair, x, weight, bias), with_bias)


# --- the weight


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda w: w.mul_(2),
    "copied": lambda w: w.copy_(torch.ones_like(w)),
    "new data": lambda w: setattr(w, "data", torch.ones_like(w)),
    "optimizer": lambda w: torch.optim.SGD([w], lr=1.0).step() if setattr(w, "grad", w * 1) is None else None,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_written_weight_is_held_anew(pair: str, write: Callable[[nn.Parameter], Any]) -> None:
    x, weight = draw(4, IN), parameter()
    before = infer(pair, x, weight)
    with torch.no_grad():
        write(weight)
    after = infer(pair, x, weight)
    assert not torch.equal(before, after)
    assert torch.equal(after, infer(pair, x, nn.Parameter(weight.detach().clone())))


def test_a_weight_is_held_once_and_goes_with_it() -> None:
    held, weight = HeldWeights(), parameter()
    kind = Kind("int8", dynamic=True, rowwise=True, fast=True)
    first = held.get(weight, kind, torch.bfloat16)
    assert held.get(weight, kind, torch.bfloat16) is first
    assert OUT * IN <= held.bytes([weight]) < 1.1 * OUT * IN
    assert held.bytes([parameter()]) == 0
    held.forget([weight, parameter()])
    assert held.bytes([weight]) == 0
    held.get(weight, kind, torch.bfloat16)
    del weight, first
    gc.collect()
    assert not len(held._of_weights)


def test_what_is_no_parameter_is_not_kept() -> None:
    held, kind = HeldWeights(), Kind("int8", dynamic=True, rowwise=True, fast=True)
    for weight in (parameter() * 1, parameter().detach()):
        assert held.get(weight, kind, torch.bfloat16) is not held.get(weight, kind, torch.bfloat16)
    with torch.inference_mode():
        made = nn.Parameter(torch.ones(OUT, IN))
        assert held.get(made, kind, torch.bfloat16) is not held.get(made, kind, torch.bfloat16)
    assert not len(held._of_weights)


# --- where torchao would be wrong without an error


@pytest.mark.parametrize("pair", PAIRS)
def test_tiny_numbers_are_not_lost_below_the_floor_of_a_scale(pair: str) -> None:
    x, weight = draw(4, IN), nn.Parameter(parameter().detach() * 1e-9)
    if PAIRS[pair][1] in ("int8", "int4"):
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        layer = nn.Linear(IN, OUT, bias=False)
        layer.weight = nn.Parameter(weight.detach().clone())
        quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
        with torch.no_grad():
            assert not layer(x.float()).any()
    assert_within_format(infer(pair, x, weight), pair, x, weight, ROW)
    if pair == "int8":
        assert_within_format(infer(pair, x * 1e-9, parameter()), pair, x * 1e-9, parameter(), ROW)


@pytest.mark.parametrize("recipe", [TENSOR, ROW], ids=["current", "rowwise"])
@pytest.mark.parametrize("rows", [slice(3, 4), slice(None)], ids=["a row", "all"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_weight_of_zeros_gives_zeros_and_not_nan(pair: str, rows: slice, recipe: Recipe) -> None:
    weight = parameter()
    with torch.no_grad():
        weight[rows] = 0
    x = draw(4, IN)
    x[1] = 0
    got = infer(pair, x, weight, recipe=recipe)
    assert not got[:, rows].any()
    assert not got[1].any()
    assert got.isfinite().all()


def test_int8_products_do_not_overflow_fp16() -> None:
    x, weight = torch.full((4, IN), 30.0, dtype=torch.float16), nn.Parameter(torch.full((OUT, IN), 0.5))
    got = infer("int8", x, weight)
    assert ((got.float() - 30 * 0.5 * IN).abs() <= 0.02 * 30 * 0.5 * IN).all()
    assert "overflow before they are scaled; use bf16" in refusal("int8 weight", x, weight)


def test_a_weight_that_torchao_leaves_alone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.backends.torchao_weights.group_of", lambda width: 128)
    kind = Kind("int4", dynamic=False, rowwise=True, fast=True)
    with pytest.raises(BackendError, match=r"left a weight \(32, 80\) as it was that was to be int4"):
        quantize(torch.ones(32, 80), kind, torch.bfloat16)


def test_settings_of_the_process_are_left_alone() -> None:
    before = inductor_config.get_config_copy(), torch.get_float32_matmul_precision()
    for pair in PAIRS:
        infer(pair, draw(4, IN), parameter())
    assert (inductor_config.get_config_copy(), torch.get_float32_matmul_precision()) == before


def test_a_cpu_whose_int8_kernels_saturate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    infer("int8", draw(4, IN), parameter())  # or a skip
    monkeypatch.setattr("torchao.utils._cpu_is_vnni_supported", lambda: False)
    assert "a CPU without VNNI saturate" in refusal("int8", draw(4, IN), parameter())
    infer("int8 weight", draw(4, IN), parameter())


def test_fp8_by_fp8_floors_a_tokens_scale_and_avoids_the_failing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec.backends import torchao_weights

    kind = Kind("fp8_e4m3", dynamic=True, rowwise=True, fast=True)
    for cuda, fast in ((None, True), ("12.9", False), ("13.0", True)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        config = torchao_weights._config(kind, torch.empty(16, 16))
        assert (config.activation_value_lb, config.mm_config.use_fast_accum) == (1e-12, fast)


def test_a_gradient_is_refused_and_not_left_out() -> None:
    for pair in PAIRS:
        weight = parameter()
        infer(pair, draw(4, IN), weight)
        spec = LinearSpec(formats=formats(pair), recipe=ROW, mode="inference")
        x = draw(4, IN).requires_grad_()
        with pytest.raises(BackendError, match="the plan is for inference"):
            (get_backend("torchao").linear(x, weight, None, spec) + x[:, :OUT]).sum().backward()


# --- refusals


@pytest.mark.parametrize(
    ("pair", "weight", "dtype", "recipe", "reason"),
    [
        ("int4 weight", (40, IN), torch.bfloat16, ROW, "out_features=40 isn't a multiple of 16"),
        ("int4 weight", (OUT, IN), torch.float32, ROW, "its int4 kernels take bf16 activations, not float32"),
        ("int8", (OUT, IN), torch.bfloat16, RowwiseRecipe(), "'rowwise' with power_of_two=False"),
        ("int8", (OUT, IN), torch.bfloat16, CurrentRecipe(epsilon=1e-8), "'current' or 'rowwise'"),
    ],
)
def test_refusals(pair: str, weight: tuple[int, int], dtype: torch.dtype, recipe: Recipe, reason: str) -> None:
    assert reason in refusal(pair, draw(4, IN, dtype=dtype), torch.zeros(weight), recipe)


def test_formats_that_torchao_does_not_hold() -> None:
    x, weight = draw(4, IN), parameter()
    for activation, name, reason in (
        ("bf16", "fp8_e5m2", "holds weights in int8, int4 or fp8_e4m3, not fp8_e5m2"),
        ("int8", "int4", "multiplies int8 by int8 and fp8_e4m3 by fp8_e4m3, not int8 by int4"),
    ):
        asked = Formats(input=activation, weight=name, grad_output="bf16")
        chosen, why = choose("linear", asked, x, weight, ("torchao",), "inference", recipe=ROW)
        assert chosen is None
        assert reason in why


@pytest.mark.parametrize("pair", ["int8", "int8 weight", "int4 weight"])
def test_training_is_refused(pair: str) -> None:
    reason = refusal(pair, draw(4, IN), parameter(), mode="training")
    assert "is rounding without a gradient: torchao has it in mode='inference' alone" in reason


def test_fp8_by_fp8_on_a_cpu_is_the_training_function() -> None:
    asked, x, weight = Formats.all("fp8_e4m3"), draw(4, IN), parameter()
    backend, reason = choose("linear", asked, x, weight, ("torchao",), "inference", recipe=RowwiseRecipe())
    assert backend is not None
    assert reason == "torchao: torchao's rowwise"
    with torch.no_grad():
        got = backend.linear(x, weight, None, LinearSpec(formats=asked, recipe=RowwiseRecipe(), mode="inference"))
    torch.testing.assert_close(got, F.linear(x, weight.bfloat16()), rtol=0.2, atol=0.2)
    assert backend.held_bytes([weight]) == 0


# --- a converted model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)
        self.tied = nn.Linear(128, 256, bias=False)
        self.tied.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.down(torch.relu(self.up(x))))


def converted(pair: str, **options: Any) -> Net:
    rules = (
        PlanRule(match=("*::linear",), formats=formats(pair)),
        PlanRule(match=("*",), formats=Formats.all("bf16")),
    )
    recipe = {"fp8": {"recipe": "rowwise", "power_of_two": False}}
    return autoprec.convert(Net().eval(), plan=Plan(rules=rules, recipe=recipe, mode="inference"), **options)  # type: ignore[return-value]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_model_keeps_its_parameters_and_comes_back(pair: str) -> None:
    plain, x = Net().eval(), draw(3, 128, dtype=torch.float32)
    model = converted(pair, example_inputs=x)
    receipt = autoprec.receipt(model)
    asked = str(formats(pair))
    if receipt["up"].got != asked:
        pytest.skip(receipt["up"].why)
    automatic = "emulated" if pair == "fp8 weight" else "torchao"  # fp8 weights are unpacked at each call on a CPU
    assert [receipt[fqn].mechanism for fqn in ("up", "down", "tied")] == [f"backend:{automatic}"] * 3
    with torch.no_grad():
        out, wanted = model(x), plain(x)
        assert (out - wanted).norm() < (0.3 if "int4" in pair else 0.1) * wanted.norm()
        assert list(model.state_dict()) == list(plain.state_dict())
        assert type(model.up.weight) is nn.Parameter
        assert model.up.weight is model.tied.weight
        assert torch.equal(model.up.weight, plain.up.weight)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x), out)
        model.up.weight.zero_()
        assert not model(x).any()
    held = get_backend(automatic).held_bytes(list(model.parameters()))
    assert (held > 0) == (automatic == "torchao")
    assert torch.equal(autoprec.revert(model)(x), model(x))
    assert get_backend(automatic).held_bytes(list(model.parameters())) == 0


def test_the_receipt_counts_what_is_held() -> None:
    receipt = autoprec.receipt(converted("int8"), draw(3, 128, dtype=torch.float32))
    if receipt["up"].mechanism != "backend:torchao":
        pytest.skip(receipt["up"].why)
    assert 2 * 128 * 256 <= receipt.extra_bytes < 1.1 * 2 * 128 * 256  # the tied weight once


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own way
@pytest.mark.parametrize("pair", PAIRS)
def test_a_compiled_or_exported_model_gives_the_same_from_the_same_weights(pair: str) -> None:
    torch._dynamo.reset()
    x = draw(3, 128, dtype=torch.float32)
    with torch.no_grad():
        model = converted(pair)
        if autoprec.receipt(model)["up"].mechanism != "backend:torchao":
            pytest.skip(autoprec.receipt(model)["up"].why)
        out = model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), out)
        assert torch.equal(torch.export.export(model, (x,)).module()(x), out)
        held = get_backend("torchao").held_bytes(list(model.parameters()))
        assert torch.equal(compiled(x), out)
        assert get_backend("torchao").held_bytes(list(model.parameters())) == held
        model.up.weight.zero_()
        assert not compiled(x).any()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own way
def test_a_compiled_gradient_is_refused_too() -> None:
    torch._dynamo.reset()
    weight = parameter()
    infer("int8", draw(4, IN), weight)
    spec = LinearSpec(formats=formats("int8"), recipe=ROW, mode="inference")
    backend = get_backend("torchao")
    compiled = torch.compile(lambda x: backend.linear(x, weight, None, spec), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="the plan is for inference"):
        compiled(draw(4, IN).requires_grad_()).sum().backward()


def test_a_transform_is_refused() -> None:
    weight = parameter()
    infer("int8", draw(4, IN), weight)
    spec = LinearSpec(formats=formats("int8"), recipe=ROW, mode="inference")
    with pytest.raises(BackendError, match=r"don't run in a torch\.func transform"):
        torch.func.vmap(lambda row: get_backend("torchao").linear(row, weight, None, spec))(draw(2, 3, IN))
