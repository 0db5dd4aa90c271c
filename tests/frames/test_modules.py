"""Modules and libraries of every kind, converted: adapters, hooks, shared and compiled parts, functional transforms."""

import collections
import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

import autoprec

BF16 = torch.bfloat16

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def convert(model, **options):
    return autoprec.convert(model, target="a100", **options)


def seeded(build, *args, **kwargs):
    torch.manual_seed(0)
    return build(*args, **kwargs)


def close(got, want, tolerance=0.02):
    return (got - want).norm() < tolerance * want.norm()


def check(model, *args, compiled=True, gemms=None, tolerance=0.02, **kwargs):
    """The converted model is near the fp32 one in value and gradient, and the same compiled."""
    plain = copy.deepcopy(model)
    model = convert(model)
    out = model(*args, **kwargs)
    want = plain(*args, **kwargs)
    assert out.dtype == want.dtype
    assert close(out, want, tolerance)
    out.square().sum().backward()
    want.square().sum().backward()
    largest = max((q.grad.norm() for q in plain.parameters() if q.grad is not None), default=0.0)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if q.grad is not None:  # a bias before a batch norm has a gradient of rounding errors alone
            assert (p.grad - q.grad).norm() < 3 * tolerance * q.grad.norm() + 0.01 * largest, name
    if compiled:
        assert torch.equal(torch.compile(model, backend="eager")(*args, **kwargs), out)
    if gemms is not None:
        with gemms() as seen:
            model(*args, **kwargs)
        assert seen.dtypes == {BF16}
    return model


# ---- writes and caches


class Decoder(nn.Module):
    def __init__(self, d=8, t=6):
        super().__init__()
        self.q, self.k = nn.Linear(d, d), nn.Linear(d, d)
        self.register_buffer("cache", torch.zeros(1, t, d), persistent=False)

    def forward(self, x, pos, how):
        k = self.k(x)
        if how == "setitem":
            self.cache[:, pos] = k
        elif how == "index_copy":
            self.cache.index_copy_(1, pos, k)
        elif how == "index_put":
            self.cache.index_put_((torch.zeros_like(pos), pos), k[0])
        elif how == "copy":
            self.cache[:, 2:4].copy_(k)
        elif how == "scatter":
            self.cache.scatter_(1, pos[None, :, None].expand(1, -1, 8), k)
        elif how == "cat":
            return (self.q(x) @ torch.cat([self.cache[:, :2], k], 1).transpose(1, 2)).softmax(-1)
        return (self.q(x) @ self.cache.transpose(1, 2)).softmax(-1) @ self.cache


@pytest.mark.parametrize("how", ["setitem", "index_copy", "index_put", "copy", "scatter", "cat"])
@pytest.mark.parametrize("target", ["a100", "v100"])
def test_key_value_cache_is_written_in_its_own_dtype(how, target):
    model = seeded(Decoder)
    plain = copy.deepcopy(model)
    args = seeded(torch.randn, 1, 2, 8), torch.tensor([2, 3]), how
    autoprec.convert(model, target=target)
    with torch.no_grad():
        assert close(model(*args), plain(*args))
    assert model.cache.dtype == torch.float32
    assert torch.equal(model.cache == 0, plain.cache == 0)


def test_hard_coded_upcast_meets_a_low_layer(gemms):
    class Upcast(nn.Module):
        def __init__(self):
            super().__init__()
            self.t, self.x, self.o = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, t):
            e = self.t((t.float()[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])).sin())
            return self.o(torch.cat([self.x(x), e[:, None, :]], 1).float().softmax(-1).to(torch.float32))

    check(seeded(Upcast), seeded(torch.randn, 2, 3, 8), torch.tensor([10, 900]), gemms=gemms)


def test_model_that_asks_for_a_parameters_dtype(gemms):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            h = self.a(x.to(self.a.weight.dtype))
            mask = torch.zeros(8, 8, dtype=h.dtype).fill_(torch.finfo(h.dtype).min).triu(1)
            return self.b((h @ h.transpose(-1, -2) + mask).softmax(-1).to(h.dtype) @ h)

    check(seeded(Asks), seeded(torch.randn, 8, 8), gemms=gemms)


# ---- recurrent


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("state", ["none", "made inside"])
def test_recurrent_layers(kind, state):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.rnn, self.out = nn.Linear(6, 6), kind(6, 8, 2, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            h = None
            if state == "made inside":
                h = torch.zeros(2, x.shape[0], 8)
                h = (h, torch.zeros(2, x.shape[0], 8)) if kind is nn.LSTM else h
            return self.out(self.rnn(self.inp(x), h)[0])

    model = seeded(Net)
    check(model, seeded(torch.randn, 3, 10, 6), compiled=False, tolerance=0.04)
    out, _ = model.rnn(torch.randn(3, 10, 6))
    assert out.dtype == torch.float32


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = kind(6, 8), nn.Linear(8, 2)

        def forward(self, x):
            h = torch.zeros(x.shape[0], 8)
            state = (h, torch.zeros_like(h)) if kind is nn.LSTMCell else h
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return self.out(state[0] if kind is nn.LSTMCell else state)

    check(seeded(Net), seeded(torch.randn, 3, 5, 6), tolerance=0.04)


@pytest.mark.parametrize("root", [True, False])
def test_packed_sequences(root):
    lstm = seeded(nn.LSTM, 6, 8, batch_first=True)
    model = lstm if root else nn.ModuleDict({"lstm": lstm})
    packed = rnn.pack_padded_sequence(seeded(torch.randn, 3, 5, 6), torch.tensor([5, 3, 2]), batch_first=True)
    want, _ = lstm(packed)
    convert(model)
    got, (h, c) = lstm(packed)
    assert isinstance(got, rnn.PackedSequence)
    assert {got.data.dtype, h.dtype, c.dtype} == {torch.float32}
    assert close(got.data, want.data, 0.03)


# ---- ties, adapters, hooks


def test_tied_weights_stay_tied_and_train(gemms):
    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.body, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            return self.head(torch.relu(self.body(self.emb(ids))))

    model = check(seeded(LM), seeded(torch.randint, 0, 32, (2, 5)), gemms=gemms)
    assert model.emb.weight is model.head.weight
    assert sum(1 for _ in model.parameters()) == 3


class Lora(nn.Linear):
    def __init__(self, i, o, r=4):
        super().__init__(i, o)
        self.lora_a, self.lora_b = nn.Linear(i, r, bias=False), nn.Linear(r, o, bias=False)

    def forward(self, x):
        return super().forward(x) + 2.0 * self.lora_b(self.lora_a(x))


def test_linear_subclass_keeps_its_forward(gemms):
    model = check(
        seeded(nn.Sequential, Lora(16, 16), nn.Tanh(), nn.Linear(16, 16)), seeded(torch.randn, 3, 16), gemms=gemms
    )
    with torch.no_grad():
        before = model(torch.ones(1, 16))
        model[0].lora_a.weight.add_(1.0)
        assert not torch.equal(model(torch.ones(1, 16)), before)


class Adapter(nn.Module):
    """Wraps a layer, as adapter libraries do."""

    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x.to(self.a.weight.dtype)))


@pytest.mark.parametrize("parent", [nn.Sequential, nn.Module])
def test_adapter_added_after_conversion(parent, gemms):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.out(torch.relu(self.layer(x)))

    torch.manual_seed(0)
    model = convert(Holder())
    model.layer = Adapter(model.layer)
    x = torch.randn(3, 16)
    got = model(x)
    with gemms() as seen:
        model(x).sum().backward()
    assert seen.dtypes == {BF16}
    assert model.layer.a.weight.grad is not None
    assert torch.equal(convert(model)(x), got)
    assert close(got, autoprec.revert(model)(x))
    assert type(model.layer.a) is nn.Linear


def test_hooks_see_what_they_saw_and_run_outside_the_plan(gemms):
    model = seeded(nn.Sequential, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    seen = []
    w = torch.randn(8, 8)
    model[0].register_forward_pre_hook(lambda m, args: (args[0] + 1.0,))
    model[0].register_forward_hook(lambda m, args, out: seen.append((torch.mm(args[0], w).dtype, m)))
    model[2].register_forward_hook(lambda m, args, out: out * 2)
    model.register_forward_hook(lambda m, args, out: seen.append((out.dtype, m)))
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append((go[0].shape, m)))
    x = seeded(torch.randn, 3, 8)
    want = model(x)
    seen.clear()
    got = convert(model)(x)
    got.sum().backward()
    assert close(got, want)
    assert seen == [(torch.float32, model[0]), (torch.float32, model), (torch.Size([3, 8]), model[2])]


def test_hooks_added_after_conversion_and_state_dict_hooks():
    model = convert(seeded(nn.Sequential, nn.Linear(4, 4)))
    calls = []
    handle = model[0].register_forward_hook(lambda *a: calls.append("forward"))
    model._register_state_dict_hook(lambda m, state, prefix, meta: calls.append("state"))
    model(torch.randn(2, 4))
    model.state_dict()
    assert calls == ["forward", "state"]
    handle.remove()
    model(torch.randn(2, 4))
    assert calls == ["forward", "state"]


def test_shared_module_and_recursion(gemms):
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x, depth=2):
            x = self.norm(torch.relu(self.lin(x)))
            return self.forward(x, depth - 1) + self(x, depth - 1) if depth else x

    shared = seeded(nn.Linear, 8, 8)
    check(nn.Sequential(shared, nn.ReLU(), shared), seeded(torch.randn, 3, 8), gemms=gemms)
    check(seeded(Tree), seeded(torch.randn, 3, 8), gemms=gemms, tolerance=0.03)


# ---- layers of torch.nn


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_multihead_attention(training, grad, gemms):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha, self.out = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 4)

        def forward(self, x):
            return self.out(self.mha(x, x, x, need_weights=False)[0])

    plain = seeded(Net).train(training)
    model = convert(copy.deepcopy(plain))
    x = seeded(torch.randn, 2, 5, 16)
    with torch.set_grad_enabled(grad):
        want, got = plain(x), model(x)
        with gemms() as seen:
            model(x)
        compiled = torch.compile(model, backend="eager")(x)
        whole, weights = model.mha(x, x, x)
    assert close(got, want)
    # Without gradients a compiler takes the fused kernel: in bf16 as well, its rounding another.
    assert close(compiled, got) if not (training or grad) else torch.equal(compiled, got)
    assert seen.dtypes == {BF16}
    assert (whole.dtype, weights.dtype) == (torch.float32, torch.float32)


def test_transformer_encoder_layer(gemms):
    layer = seeded(nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.0, batch_first=True)
    check(layer, seeded(torch.randn, 2, 5, 16), gemms=gemms)


def test_transformer_decoder(gemms):
    decoder = nn.TransformerDecoder(seeded(nn.TransformerDecoderLayer, 16, 2, 32, dropout=0.0, batch_first=True), 2)
    check(decoder, seeded(torch.randn, 2, 5, 16), torch.randn(2, 4, 16), gemms=gemms)


LAYERS = {
    "conv1d": (lambda: nn.Conv1d(4, 8, 3, padding=1), (2, 4, 9)),
    "conv2d circular": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), (2, 4, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 3), (1, 2, 5, 5, 5)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False), (2, 4, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 8, 3, stride=2), (2, 4, 6, 6)),
    "norms": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.ReLU(True)),
        (2, 4, 6, 6),
    ),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
        (2, 4, 6, 6),
    ),
    "rms": (lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.SiLU()), (3, 8)),
    "pools": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (2, 4, 8, 8),
    ),
    "upsample": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear")), (2, 4, 6, 6)),
    "prelu": (lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Hardtanh(inplace=True)), (3, 8)),
    "fold": (lambda: nn.Sequential(nn.Unfold(2), nn.Conv1d(16, 16, 1), nn.Fold((5, 5), 2)), (2, 4, 5, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    build, shape = LAYERS[name]
    check(seeded(build), seeded(torch.randn, *shape), compiled=name in ("norms", "prelu"), tolerance=0.03)


def test_bilinear_layer(gemms):
    check(seeded(nn.Bilinear, 4, 5, 6), seeded(torch.randn, 3, 4), torch.randn(3, 5))


def test_convolution_changed_in_its_inner_method():
    """Weight standardisation sits in ``_conv_forward``: its statistics stay fp32."""
    seen = []

    class Standardized(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            mean = weight.mean((1, 2, 3), keepdim=True)
            std = weight.std((1, 2, 3), keepdim=True)
            seen.extend([mean.dtype, std.dtype])
            return super()._conv_forward(input, (weight - mean) / (std + 1e-5), bias)

    check(seeded(Standardized, 3, 4, 3), seeded(torch.randn, 2, 3, 6, 6))
    assert set(seen) == {torch.float32}


def test_lazy_layers_materialise_into_the_plan(gemms):
    model = convert(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4)))
    x = torch.randn(3, 5)
    model(x)
    with gemms() as seen:
        model(x)
    assert seen.dtypes == {BF16}
    assert isinstance(model[0], nn.Linear)
    assert not isinstance(model[0], nn.LazyLinear)
    with gemms() as seen:
        model[0](x)
    assert seen.dtypes == {BF16}
    assert type(autoprec.revert(model)[0]) is nn.Linear


# ---- graphs and transforms


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.w, self.norm = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6) / 3), nn.LayerNorm(6)

    def forward(self, x):
        return torch.softmax(self.norm(self.a(x)) @ self.w, -1) @ self.w


@pytest.mark.parametrize("place", ["root", "child"])
@pytest.mark.parametrize("carry", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy])
def test_traced_graph_module(place, carry, gemms):
    traced = torch.fx.symbolic_trace(seeded(Small))
    model = traced if place == "root" else nn.Sequential(traced, nn.Linear(6, 6))
    x = seeded(torch.randn, 3, 6)
    want = model(x)
    model = carry(convert(model))
    with gemms() as seen:
        got = model(x)
    assert seen.dtypes == {BF16}
    assert close(got, want)
    assert torch.equal(torch.compile(model, backend="eager")(x), got)
    assert close(autoprec.revert(model)(x), want, 1e-6)


def test_traced_graph_module_recompiled_after_conversion(gemms):
    traced = convert(torch.fx.symbolic_trace(seeded(Small)))
    x = torch.randn(3, 6)
    want = traced(x)
    traced.graph.lint()
    traced.recompile()
    with gemms() as seen:
        got = traced(x)
    assert seen.dtypes == {BF16}
    assert torch.equal(got, want)


def test_cond_with_products_in_its_branches():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            x = self.lin(x)
            return torch.cond(x.sum() > 0, lambda t: torch.softmax(t @ self.w, -1), lambda t: t @ self.w.t(), (x,))

    plain = seeded(Branches)
    model = convert(copy.deepcopy(plain))
    for x in (seeded(torch.randn, 3, 4), -seeded(torch.randn, 3, 4)):
        got = model(x)
        assert got.dtype == torch.float32
        assert close(got, plain(x))
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), got)
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), got)


def test_functional_call_uses_the_given_parameters(gemms):
    model = convert(seeded(Small))
    x = torch.randn(3, 6)
    given = {name: p.detach() * 2 for name, p in model.named_parameters()}
    with gemms() as seen:
        got = torch.func.functional_call(model, given, (x,))
    assert seen.dtypes == {BF16}
    assert not torch.equal(got, model(x))
    plain = seeded(Small)
    assert close(got, torch.func.functional_call(plain, given, (x,)))


def test_functional_transforms():
    model, plain = convert(seeded(Small)), seeded(Small)
    x = seeded(torch.randn, 4, 6)
    assert close(torch.vmap(model)(x), model(x))
    for transform in (
        lambda m: torch.func.grad(lambda t: m(t).square().sum())(x),
        lambda m: torch.func.jacrev(m)(x[0]),
        lambda m: torch.func.jacfwd(m)(x[0]),
        lambda m: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1],
        lambda m: torch.func.vmap(torch.func.grad(lambda t: m(t).square().sum()))(x),
    ):
        got, want = transform(model), transform(plain)
        assert got.dtype == torch.float32
        assert close(got, want, 0.05)


def test_a_users_own_function_mode_inside_or_outside():
    class Count(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    class Inside(nn.Module):
        def __init__(self, mode):
            super().__init__()
            self.small, self.lin, self.mode = Small(), nn.Linear(6, 6), mode

        def forward(self, x):
            if self.mode is None:
                return self.lin(self.small(x))
            with self.mode:
                return self.lin(self.small(x))

    x = seeded(torch.randn, 3, 6)
    want = convert(seeded(Inside, None))(x)
    inside = Count()
    assert torch.equal(convert(seeded(Inside, inside))(x), want)
    assert "linear" in inside.names
    with Count() as outside:
        assert torch.equal(convert(seeded(Inside, None))(x), want)
    assert "linear" in outside.names
    with torch.device("cpu"):
        assert torch.equal(convert(seeded(Inside, None))(x), want)


def test_under_the_users_autocast_the_plan_wins_where_it_speaks():
    model = convert(seeded(Small))
    x = torch.randn(3, 6)
    want = model(x)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(model(x).float(), want)


def test_the_users_autocast_cannot_lower_what_a_plan_keeps_in_fp32():
    model = seeded(Small)
    x = torch.randn(3, 6)
    want = model(x)
    autoprec.convert(model, formats="fp32")
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(model(x), want)


# ---- containers of outputs


@dataclass
class Result:
    logits: torch.Tensor
    name: str
    extra: tuple = ()


Pair = collections.namedtuple("Pair", "first second")


class Holder:
    """A cache: its tensors are its own."""

    def __init__(self, value):
        self.value = value


OUTPUTS = {
    "tensor": lambda h: h,
    "tuple": lambda h: (h, [h, None], 3),
    "dict": lambda h: {"a": h, "b": (h,)},
    "ordered": lambda h: collections.OrderedDict(a=h),
    "namedtuple": lambda h: Pair(h, {"x": h}),
    "dataclass": lambda h: Result(h, "n", (h,)),
    "integers": lambda h: (h, h.argmax(-1)),
    "torch namedtuple": lambda h: torch.max(h, -1),
}


def tensors(out):
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, Result):
        return tensors((out.logits, out.extra))
    items = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else ()
    return [t for item in items for t in tensors(item)]


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_keep_their_container_and_the_fp32_dtypes(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return OUTPUTS[kind](self.lin(x))

    plain = seeded(Net)
    model = convert(copy.deepcopy(plain))
    x = torch.randn(3, 4)
    want, got = plain(x), model(x)
    assert type(got) is type(want)
    assert [t.dtype for t in tensors(got)] == [t.dtype for t in tensors(want)]
    compiled = torch.compile(model, backend="eager")(x)
    assert type(compiled) is type(want)
    assert all(torch.equal(a, b) for a, b in zip(tensors(compiled), tensors(got), strict=True))


def test_an_unknown_object_in_the_outputs_is_handed_on():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            h = self.lin(x)
            return h, Holder(h)

    out, holder = convert(Net())(torch.randn(2, 4))
    assert out.dtype == torch.float32
    assert holder.value.dtype == BF16


def test_fp64_and_complex_are_never_narrowed(gemms):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.wide = nn.Linear(4, 4), nn.Linear(4, 4).double()

        def forward(self, x):
            z = torch.fft.fft(self.lin(x))
            return self.wide(x.double()), (z @ z.conj().T).real

    plain = seeded(Mixed)
    model = convert(copy.deepcopy(plain))
    x = torch.randn(4, 4)
    for got, want in zip(model(x), plain(x), strict=True):
        assert got.dtype == want.dtype
        assert close(got, want)
    assert torch.equal(model(x)[0], plain(x)[0])


def test_dropout_follows_train_and_eval():
    model = convert(seeded(nn.Sequential, nn.Linear(16, 16), nn.Dropout(0.5))).train()
    x = torch.randn(4, 16)
    assert (model(x) == 0).float().mean() > 0.2
    assert (model.eval()(x) == 0).float().mean() == 0
    assert torch.equal(model(x), model(x))


def test_embedding_renormalises_its_own_weight():
    model = convert(nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 4)))
    model(torch.arange(8))
    assert model[0].weight.norm(dim=-1).max() <= 0.5 + 1e-5


def test_moe_experts_as_one_parameter(gemms):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.up = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 8) / 3)

        def forward(self, x):
            weights, chosen = torch.topk(F.softmax(self.scores(x), -1), 2)
            y = torch.bmm(x.expand(4, *x.shape), self.up)
            picked = y[chosen, torch.arange(len(x))[:, None]]
            return torch.einsum("nk,nkd->nd", weights, picked)

    check(seeded(Experts), seeded(torch.randn, 6, 8), gemms=gemms)
