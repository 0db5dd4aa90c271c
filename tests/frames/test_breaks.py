"""What once broke the plan, most often in silence: each a way of writing or calling a model."""

import copy
import functools
import math
import threading
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import autoprec

BF16 = torch.bfloat16

# torch's own, met by plain models too: by Dynamo between two compiled parts and at an autograd.Function, by jit, by
# nested tensors
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*deprecated"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def convert(model, **options):
    return autoprec.convert(model, target="a100", **options)


def seeded(build, *args, **kwargs):
    torch.manual_seed(0)
    return build(*args, **kwargs)


def close(got, want, tolerance=0.02):
    return (got - want).norm() < tolerance * want.norm()


def graphs_of(call, *args):
    """The number of graphs that Dynamo makes of a call, and what the call returned."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    out = torch.compile(call, backend=backend)(*args)
    return graphs, out


def dtypes_of_ops(graph):
    return {str(node.target): node.meta["example_value"].dtype for node in graph.graph.nodes if node.op != "output"}


# ---- silent: the plan or a number lost


@pytest.mark.parametrize("training", [True, False])
def test_encoder_layer_in_a_graph_keeps_the_plan(training):
    """Under a compiler the fused layer takes no notice of modes: the whole layer would run in fp32."""
    layer = seeded(nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.0, batch_first=True)
    layer = convert(layer).train(training)
    x = torch.randn(2, 4, 16)
    with torch.no_grad():
        want = layer(x)
        graphs, got = graphs_of(layer, x)
    assert torch.equal(got, want)
    assert not any("transformer_encoder_layer" in str(n.target) for g in graphs for n in g.graph.nodes)
    autoprec.revert(layer)
    assert layer.activation_relu_or_gelu == nn.TransformerEncoderLayer(16, 2).activation_relu_or_gelu


def test_encoder_stack_with_padding_in_a_graph_keeps_the_plan(gemms):
    encoder = nn.TransformerEncoder(seeded(nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.0, batch_first=True), 2)
    plain = copy.deepcopy(encoder).eval()
    encoder = convert(encoder).eval()
    x, padding = torch.randn(2, 4, 16), torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        with gemms() as seen:
            want = encoder(x, src_key_padding_mask=padding)
        compiled = torch.compile(encoder, backend="eager")
        got = compiled(x, src_key_padding_mask=padding)
        reference = plain(x, src_key_padding_mask=padding)
    assert seen.dtypes == {BF16}
    assert torch.equal(got[~padding], want[~padding])
    assert close(want[~padding], reference[~padding])


@pytest.mark.parametrize(("moved", "compiled"), [(BF16, False), (BF16, True), (torch.float16, False)])
def test_running_statistics_are_updated_after_the_model_is_moved_to_16_bit(moved, compiled):
    model = convert(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.5))).to(moved)
    before = model[1].running_mean.clone()
    call = torch.compile(model, backend="eager") if compiled else model
    call(torch.randn(64, 8) + 1)
    assert model[1].running_mean.dtype == moved
    assert not torch.equal(model[1].running_mean, before)
    assert int(model[1].num_batches_tracked) == 1


@pytest.mark.parametrize("moved", [BF16, torch.float16])
@pytest.mark.parametrize("dtype", [None, BF16])
def test_running_statistics_are_updated_by_the_functional_spellings(moved, dtype):
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
            for name in "abc":
                self.register_buffer(f"mean_{name}", torch.zeros(4))
                self.register_buffer(f"var_{name}", torch.ones(4))

        def forward(self, x):
            x = self.lin(x).to(x.dtype)
            x = F.batch_norm(x, self.mean_a, self.var_a, self.weight, self.bias, True, 0.5)
            x = torch.batch_norm(x + 1, self.weight, self.bias, self.mean_b, self.var_b, True, 0.5, 1e-5, False)
            return F.batch_norm(x + 1, running_mean=self.mean_c, running_var=self.var_c, training=True, momentum=0.5)

    model = convert(Norms()).to(moved)
    x = torch.randn(32, 4)
    model.forward(x if dtype is None else x.to(dtype)).sum().backward()
    for name in "abc":
        assert model.get_buffer(f"mean_{name}").abs().sum() > 0, name
        assert not torch.equal(model.get_buffer(f"var_{name}"), torch.ones(4)), name


def test_running_statistics_stay_fp32_beyond_fp16():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.5))
    plain = copy.deepcopy(model)
    model = autoprec.convert(model, target="v100")
    x = torch.randn(64, 8) * 900
    plain.train()(x), model.train()(x)
    assert model[1].running_var.dtype == torch.float32
    assert model[1].running_var.max() > 65504
    assert close(model.eval()(x), plain.eval()(x))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x @ w) ** 3

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = grad * 3 * (x @ w) ** 2
        return grad @ w.t(), x.t() @ grad


def cube(x, w):
    return Cube.apply(x, w)


class Base(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x @ w) ** 3

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = grad * 3 * (x @ w) ** 2
        return grad @ w.t(), x.t() @ grad


class Square(Base):
    """Named as an attribute of a module, or by a bound ``apply``; its body is inherited."""


functions = types.ModuleType("functions")
functions.Square = Square
square = Square.apply


class WithFunction(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.lin, self.w, self.how = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6) / 3), how

    def forward(self, x):
        x, w = self.lin(x), self.w
        return (self.how(w=w, x=x) if isinstance(self.how, functools.partial) else self.how(x, w)).mean()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(lambda x, w: Cube.apply(x, w), id="lambda"),
        pytest.param(cube, id="helper"),
        pytest.param(lambda x, w: functions.Square.apply(x, w), id="attribute"),
        pytest.param(square, id="bound"),
        pytest.param(functools.partial(lambda w, x: square(x, w)), id="partial"),
    ],
)
def test_autograd_function_keeps_its_gradient(how):
    torch.manual_seed(0)
    model = convert(WithFunction(how))
    x = torch.randn(4, 6)
    model(x).backward()
    want = model.w.grad.clone()
    with torch.no_grad():
        h = F.linear(x.to(BF16), model.lin.weight.to(BF16), model.lin.bias.to(BF16)).float()
    w = model.w.detach().clone().requires_grad_()
    ((h @ w) ** 3).mean().backward()
    torch.testing.assert_close(want, w.grad)
    model.zero_grad()
    graphs, out = graphs_of(model, x)
    out.backward()
    assert len(graphs) == 1
    torch.testing.assert_close(model.w.grad, want)


class Checkpointed(nn.Module):
    """A checkpointed method, local function or lambda; recomputation happens when no forward runs."""

    def __init__(self, what, reentrant, call=checkpoint):
        super().__init__()
        self.first, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 3)
        self.what, self.reentrant, self.call = what, reentrant, call

    def body(self, x):
        return torch.softmax(x @ self.w, -1) * torch.exp(x @ self.w.t()).sum(-1, keepdim=True)

    def forward(self, x):
        def local(t):
            return torch.softmax(t @ self.w, -1) * torch.exp(t @ self.w.t()).sum(-1, keepdim=True)

        x = self.first(x)
        if self.what == "none":
            return self.body(x).mean()
        function = {"method": self.body, "local": local, "partial": functools.partial(soft_exp, w=self.w)}[self.what]
        return self.call(function, x, use_reentrant=self.reentrant).mean()


def soft_exp(t, w):
    return torch.softmax(t @ w, -1) * torch.exp(t @ w.t()).sum(-1, keepdim=True)


def by_attribute(*args, **kwargs):
    return torch.utils.checkpoint.checkpoint(*args, **kwargs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("what", "call"),
    [("method", checkpoint), ("local", checkpoint), ("local", by_attribute), ("partial", by_attribute)],
)
def test_checkpointed_function_is_recomputed_in_the_plan(what, reentrant, compiled, call):
    def gradients(what):
        model = convert(seeded(Checkpointed, what, reentrant, call))
        x = seeded(torch.randn, 4, 8).requires_grad_()
        run = torch.compile(model, backend="aot_eager") if compiled and what != "none" else model
        run(x).backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    for got, want in zip(gradients(what), gradients("none"), strict=True):
        assert torch.equal(got, want)


def test_scripting_a_converted_model_is_refused_aloud():
    """torch.jit.script would follow ``__wrapped__`` to the fp32 original."""
    model = convert(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    with pytest.raises(torch.jit.frontend.NotSupportedError):
        torch.jit.script(model)


def test_the_users_own_compile_wins():
    model = convert(nn.Sequential(nn.Linear(4, 4)))
    ran = []

    def backend(graph, inputs):
        ran.append(graph)
        return graph

    model.compile(backend=backend)
    model(torch.randn(2, 4))
    assert len(ran) == 1


def test_tools_that_look_at_the_exact_type_work_after_revert():
    from torch.ao.quantization import quantize_dynamic

    model = autoprec.revert(convert(nn.Sequential(nn.Linear(4, 4))))
    assert type(model[0]) is nn.Linear
    quantized = quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(quantized[0]) is not nn.Linear


# ---- crashes


class Unusual(nn.Module):
    """Ops that Dynamo guards on, or calls, in another way under a mode."""

    def __init__(self):
        super().__init__()
        self.lin, self.w = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        x = self.lin(x)
        x = x / x.norm(dim=-1, keepdim=True)
        x = x**2 + 2.0 ** x.clamp(-1, 1)
        x = x.unflatten(-1, (2, 3)).flatten(-2)
        x = self.w.detach().__rmatmul__(x) if hasattr(self.w, "__rmatmul__") else x @ self.w
        return torch.fft.fft(x).real + x.unflatten(dim=-1, sizes=(3, 2)).flatten(-2)


def test_python_level_methods_trace_in_one_graph():
    model = convert(seeded(Unusual))
    x = torch.randn(3, 6)
    graphs, out = graphs_of(model, x)
    assert len(graphs) == 1
    assert torch.equal(out, model(x))


def test_handler_is_inlined_after_a_graph_break():
    """Compiled as a frame of its own after a break, the handler mixed up the properties of a tensor."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            best = self.gate(x).softmax(-1).argmax(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = torch.where(best == number)[0]
                if rows.tolist():
                    part = expert(x[rows])
                    out.index_add_(0, rows.to(x.device), part.to(x.device).type_as(x))
            return out.reshape(x.shape)

    model = convert(seeded(Experts))
    x = torch.randn(6, 8)
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


def test_blocks_compiled_one_by_one_share_their_graphs():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.lin = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return x + F.gelu(self.lin(self.norm(x)))

    def compiles(model):
        torch.compiler.reset()
        counter = torch._dynamo.testing.CompileCounter()
        for layer in model:
            layer.compile(backend=counter)
        model(torch.randn(2, 8))
        return counter.frame_count

    plain = nn.Sequential(*(Layer() for _ in range(12)))
    assert compiles(convert(copy.deepcopy(plain))) == compiles(plain)


def test_generator_forward_computes_in_its_frame():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            for _ in range(3):
                x = torch.softmax(self.lin(x) @ self.w, -1)
                scale = yield x
                x = x * (scale or 1.0)
            return "done"

    model = convert(seeded(Steps))
    steps = model(torch.randn(2, 4))
    assert next(steps).dtype == torch.float32
    assert steps.send(2.0).dtype == torch.float32
    assert torch._C._len_torch_function_stack() == 0  # between the steps the caller's own ops are its own
    assert torch.mm(torch.randn(2, 4), model.w).dtype == torch.float32
    with pytest.raises(ValueError, match="stop here"):
        steps.throw(ValueError("stop here"))
    half = model(torch.randn(2, 4))
    next(half)
    half.close()
    with pytest.raises(StopIteration):
        next(half)


def test_generator_forward_cleans_up_when_it_is_dropped():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.closed = nn.Linear(4, 4), False

        def forward(self, x):
            try:
                while True:
                    yield self.lin(x)
            finally:
                self.closed = True

    model = convert(Steps())
    steps = model(torch.randn(2, 4))
    next(steps)
    del steps
    assert model.closed
    assert torch._C._len_torch_function_stack() == 0


def test_generator_method_computes_in_its_frame(gemms):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return list(self.steps(x))[-1]

        def steps(self, x):
            for _ in range(2):
                x = x @ self.w
                yield x

    model = convert(seeded(Decoder))
    x = torch.randn(2, 4)
    with gemms() as seen:
        alone = list(model.steps(x))[-1]
    assert seen.dtypes == {BF16}
    assert torch.equal(alone, model(x))


@pytest.mark.parametrize("place", ["child", "deep"])
def test_scripted_child_gets_the_dtype_of_its_parameters(place):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.lin(x))

    scripted = torch.jit.script(seeded(Inner))
    body = scripted if place == "child" else nn.Sequential(nn.Identity(), nn.ModuleDict({"a": scripted})["a"])
    model = nn.Sequential(nn.Linear(4, 4), body, nn.Linear(4, 4))
    x = torch.randn(3, 4)
    want = model(x)
    model = convert(model)
    assert close(model(x), want)
    assert close(torch.compile(model, backend="eager")(x), want)
    assert close(autoprec.revert(model)(x), want, 1e-6)


@pytest.mark.parametrize("moved", [BF16, torch.float16])
def test_model_moved_to_16_bit_after_conversion_runs(moved, gpt):
    model = convert(gpt.model())
    ids = gpt.args()[0]
    want = model(ids)
    got = model.to(moved)(ids)
    assert got.dtype == torch.float32
    assert close(got, want, 0.05)


def test_parametrization_added_after_conversion_survives_revert():
    class Double(nn.Module):
        def forward(self, w):
            return w * 2

    model = convert(seeded(nn.Sequential, nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    parametrize.register_parametrization(model[0], "weight", Double())
    with_plan = model(x)
    autoprec.revert(model)
    assert parametrize.is_parametrized(model[0])
    without = model(x)
    assert close(with_plan, without)
    assert not torch.equal(with_plan, without)
    convert(model)
    assert torch.equal(model(x), with_plan)
    autoprec.revert(model)
    parametrize.remove_parametrizations(model[0], "weight")
    assert torch.equal(model(x), without)
    assert isinstance(model[0], nn.Linear)


def test_parametrization_removed_while_converted(gemms):
    model = seeded(nn.Sequential, nn.Linear(4, 4), nn.Linear(4, 4))
    parametrizations.weight_norm(model[0])
    convert(model)
    x = torch.randn(3, 4)
    want = model(x)
    parametrize.remove_parametrizations(model[0], "weight")
    with gemms() as seen:
        assert close(model(x), want, 1e-2)
    assert seen.dtypes == {BF16}
    autoprec.revert(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("how", ["old", "new"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_weight_norm_and_spectral_norm(how, gemms):
    model = seeded(nn.Sequential, nn.Linear(6, 6), nn.Linear(6, 6))
    if how == "old":
        nn.utils.weight_norm(model[0])
        nn.utils.spectral_norm(model[1])
    else:
        parametrizations.weight_norm(model[0])
        parametrizations.spectral_norm(model[1])
    model.eval()
    x = torch.randn(3, 6)
    want = model(x)
    with gemms() as seen:
        got = convert(model)(x)
    assert close(got, want)
    assert seen.seen[-1][1][0] == BF16
    model.train()(x).sum().backward()


def test_fills_wider_than_the_format_stay_finite():
    class Fill(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            x = self.lin(x)
            mask = torch.eye(8, dtype=torch.bool)
            a = x.masked_fill(mask, torch.finfo(torch.float32).min)
            b = torch.where(mask, -1e9, x)
            c = x.clone().masked_fill_(mask, -1e9)
            d = x.clone()
            d[mask] = -1e30
            return torch.stack([a.softmax(-1), b.softmax(-1), c.softmax(-1), d.softmax(-1)])

    for target in ("a100", "v100"):
        model = seeded(Fill)
        x = torch.randn(8, 8)
        want = model(x)
        got = autoprec.convert(model, target=target)(x)
        assert torch.isfinite(got).all()
        assert close(got, want)


@pytest.mark.parametrize("op", [torch.dot, torch.vdot, torch.outer, torch.inner, torch.lerp])
def test_ops_that_dont_promote_get_one_dtype(op):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

        def forward(self, x):
            h = self.lin(x)
            return op(h, self.w, 0.3) if op is torch.lerp else op(h, self.w)

    model = seeded(Mixed)
    x = torch.randn(8)
    want = model(x)
    assert close(convert(model)(x), want)


def test_in_place_on_a_cast_does_what_it_does_in_fp32():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            h = self.lin(x)
            y = torch.relu(h)
            y.add_(x).mul_(2.0)
            total = torch.zeros_like(x)
            total += y
            total[:, 2:4] = h[:, 2:4]
            total.addmm_(h, self.lin.weight)
            return total

    model = seeded(InPlace)
    x = torch.randn(4, 8)
    want = model(x)
    model = convert(model)
    assert close(model(x), want)
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


def test_half_precision_numbers_leave_for_numpy():
    """numpy has no bf16: outputs are fp32, so that a caller can go on with them."""
    model = convert(nn.Sequential(nn.Linear(4, 4)))
    assert model(torch.randn(2, 4)).detach().numpy().dtype == "float32"


# ---- the stack is left as it was


def test_exceptions_leave_no_mode_and_the_parents_frame():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x, fail=True):
            if fail:
                raise KeyError("child")
            return self.lin(x)

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child, self.w = Fails(), nn.Parameter(torch.randn(4, 4))

        def forward(self, x, catch=True):
            try:
                self.child(x)
            except KeyError:
                if not catch:
                    raise
            return torch.softmax(x @ self.w, -1), x @ self.w

    model = convert(seeded(Parent), level="O3")
    x = torch.randn(2, 4)
    soft, product = model(x)
    assert (soft.dtype, product.dtype) == (torch.float32, BF16)
    with pytest.raises(KeyError):
        model(x, catch=False)
    assert torch._C._len_torch_function_stack() == 0
    with pytest.raises(RuntimeError):
        nn.Sequential.forward(convert(nn.Sequential(nn.Linear(4, 4))), torch.randn(3, 5))
    assert torch._C._len_torch_function_stack() == 0


def test_early_stopped_recomputation_leaves_no_mode():
    torch.manual_seed(0)
    model = convert(Checkpointed("local", False))
    model(torch.randn(4, 8)).backward()
    assert torch._C._len_torch_function_stack() == 0


def test_three_threads_at_once(gpt):
    model = convert(gpt.model())
    inputs = [gpt.args(seed)[0] for seed in range(3)]
    want = [model(ids) for ids in inputs]
    got: dict[int, list[torch.Tensor]] = {}

    def work(number):
        got[number] = [model(inputs[number]) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, outs in got.items():
        assert all(torch.equal(out, want[number]) for out in outs)
    assert len(got) == 3


def test_private_names_that_frames_stand_on_exist():
    from torch._dynamo.eval_frame import skip_code

    assert callable(skip_code)
    for name in (
        "_len_torch_function_stack",
        "_get_function_stack_at",
        "_pop_torch_function_stack",
        "_push_on_torch_function_stack",
    ):
        assert callable(getattr(torch._C, name))
    assert callable(torch.utils.checkpoint._checkpoint_without_reentrant_generator)
    assert hasattr(torch.utils.checkpoint.CheckpointFunction, "forward")
    for name in ("_call_impl", "_wrapped_call_impl"):
        assert hasattr(nn.Module, name)
    assert hasattr(nn.Conv2d, "_conv_forward")
    assert hasattr(seeded(nn.TransformerEncoderLayer, 4, 1), "activation_relu_or_gelu")


# ---- argument forms


class Form(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.w = call, nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.call(x, self.w)


def out_argument(x, w):
    out = torch.empty(x.shape[0], 4)
    torch.matmul(x.detach(), w.detach(), out=out)
    return out


PRODUCTS = {
    "operator": lambda x, w: x @ w,
    "torch": lambda x, w: torch.matmul(x, w),
    "method": lambda x, w: x.matmul(w),
    "keywords": lambda x, w: torch.matmul(input=x, other=w),
    "out=None": lambda x, w: torch.matmul(x, w, out=None),
    "mm": lambda x, w: x.mm(w),
    "torch.mm": lambda x, w: torch.mm(x, mat2=w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "method bmm": lambda x, w: x[None].bmm(w[None]),
    "addmm": lambda x, w: torch.addmm(torch.zeros(4), x, w),
    "method addmm": lambda x, w: torch.zeros(4).addmm(x, w, beta=0.5),
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(4), x[None], w[None]),
    "mv": lambda x, w: torch.mv(w, x[0]),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "einsum list": lambda x, w: torch.einsum("ij,jk->ik", [x, w]),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=1),
    "F.linear": lambda x, w: F.linear(x, w),
    "F.linear keywords": lambda x, w: F.linear(input=x, weight=w, bias=None),
    "chain": lambda x, w: torch.linalg.multi_dot([x, w, w]),
    "linalg": lambda x, w: torch.linalg.matmul(x, w),
    "rmatmul": lambda x, w: w.__rmatmul__(x),
    "conv1d": lambda x, w: F.conv1d(x[None], w[:, :, None][:, :3], padding=0),
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x[None], w[:3, :, None]),
    "sdpa": lambda x, w: F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None]),
}


@pytest.mark.parametrize("form", PRODUCTS)
def test_every_spelling_of_a_product_runs_low(form, gemms):
    model = seeded(Form, PRODUCTS[form])
    x = torch.randn(3, 4)
    with torch.no_grad():
        want = model(x)
        model = convert(model)
        with gemms() as seen:
            got = model(x)
        assert got.dtype == torch.float32
        assert close(got, want)
        assert seen.dtypes == {BF16} or form == "sdpa"  # its kernel is one op below autograd
        graphs, compiled = graphs_of(model, x)
    assert len(graphs) == 1
    assert torch.equal(compiled, got)


def test_a_given_output_tensor_is_written():
    model = seeded(Form, out_argument)
    x = torch.randn(3, 4)
    assert torch.equal(convert(model)(x), x @ model.w)


SOFTMAXES = {
    "torch": lambda h: torch.softmax(h, -1),
    "keyword": lambda h: torch.softmax(input=h, dim=-1),
    "method": lambda h: h.softmax(-1),
    "F": lambda h: F.softmax(h, dim=-1),
    "module": nn.Softmax(-1),
    "log": lambda h: F.log_softmax(h, -1).exp(),
    "dtype": lambda h: F.softmax(h, -1, dtype=torch.float32),
    "special": lambda h: torch.special.softmax(h, -1),
}


@pytest.mark.parametrize("form", SOFTMAXES)
def test_every_spelling_of_softmax_runs_in_fp32(form):
    model = seeded(nn.Sequential, nn.Linear(4, 4, bias=False))
    softmax = SOFTMAXES[form]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return softmax(self.lin(x))

    model = convert(seeded(Net), level="O3")  # O3 returns outputs in the dtype they were computed in
    x = torch.randn(3, 4)
    with torch.no_grad():
        got = model(x)
        want = F.softmax(F.linear(x.to(BF16), model.lin.weight).float(), -1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)


NORMALIZES = {
    "default": lambda h: F.normalize(h),
    "dim": lambda h: F.normalize(h, dim=-1, eps=1e-12),
    "out=None": lambda h: F.normalize(h, out=None),
    "cosine": lambda h: F.cosine_similarity(h, h * 2, dim=-1),
    "norm": lambda h: h.norm(dim=-1),
    "torch.norm": lambda h: torch.norm(h, dim=-1),
    "linalg": lambda h: torch.linalg.vector_norm(h, dim=-1),
    "pow": lambda h: h.pow(2),
    "power": lambda h: h**2,
    "rpow": lambda h: 2.0**h,
    "square": lambda h: h.square(),
    "exp": lambda h: h.exp(),
    "sum": lambda h: h.sum(-1),
    "mean": lambda h: torch.mean(h, dim=-1),
    "var": lambda h: h.var(-1),
}


@pytest.mark.parametrize("form", NORMALIZES)
def test_every_spelling_of_a_wide_op_runs_in_fp32_both_ways(form):
    op = NORMALIZES[form]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return op(self.lin(x))

    model = convert(seeded(Net), level="O3")
    x = torch.randn(3, 4)
    with torch.no_grad():
        got = model(x)
        compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert got.dtype == torch.float32
    assert torch.equal(compiled, got)
    assert math.isfinite(float(got.sum()))


def test_pruning_after_conversion(gemms):
    model = convert(seeded(nn.Sequential, nn.Linear(8, 8), nn.Linear(8, 2)))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    with gemms() as seen:
        model(torch.randn(3, 8)).sum().backward()
    assert seen.dtypes == {BF16}
    prune.remove(model[0], "weight")
    assert type(autoprec.revert(model)[0]) is nn.Linear
