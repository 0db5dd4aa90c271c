"""The plan is in force however the model is called: every way runs the same GEMMs and gives the same bits."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoprec

BF16 = torch.bfloat16

# strict export takes any function mode that a forward enters, and leaves again, for a side effect
STRICT_EXPORT_WARNS = pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
# torch's own, when it imports inductor
INDUCTOR_WARNS = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")


def converted(subject):
    return autoprec.convert(subject.model(), target="a100")


def flat(out):
    return [out] if isinstance(out, torch.Tensor) else [t for item in out for t in flat(item)]


def run(call, model, args):
    """Outputs and gradients of one call."""
    model.zero_grad()
    out = flat(call(*args))
    sum((t * t).sum() for t in out).backward()
    return [t.detach() for t in out], {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(got, want):
    for a, b in zip(got[0], want[0], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert torch.equal(got[1][name], gradient), name


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


def through_checkpoint(model, reentrant):
    def call(*args):
        # reentrant checkpointing wants an input that needs a gradient
        args = [a.requires_grad_() if a.is_floating_point() else a for a in args]
        return checkpoint(model, *args, use_reentrant=reentrant)

    return call


def roundtrip(model, tmp_path):
    path = tmp_path / "model.pt"
    torch.save(model, path)
    return torch.load(path, weights_only=False)


WAYS = {
    "forward": lambda model, tmp_path: (model.forward, model),
    "wrapper": lambda model, tmp_path: (Wrapper(model), model),
    "converted wrapper": lambda model, tmp_path: (autoprec.convert(Wrapper(model), target="a100"), model),
    "checkpoint": lambda model, tmp_path: (through_checkpoint(model, False), model),
    "deepcopy": lambda model, tmp_path: (copied := copy.deepcopy(model), copied),
    "pickle": lambda model, tmp_path: (copied := pickle.loads(pickle.dumps(model)), copied),
    "torch.save": lambda model, tmp_path: (copied := roundtrip(model, tmp_path), copied),
    "eval and back": lambda model, tmp_path: (model.eval().train(), model),
    "eval": lambda model, tmp_path: (model.eval(), model),
    "convert twice": lambda model, tmp_path: (autoprec.convert(model, target="a100"), model),
}

COMPILED_WAYS = {
    "aot_eager, one graph": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "wrapper": lambda model: torch.compile(Wrapper(model), backend="aot_eager"),
}

MORE_COMPILED_WAYS = {
    "eager": lambda model: torch.compile(model, backend="eager"),
    "forward": lambda model: torch.compile(model.forward, backend="eager"),
    "dynamic": lambda model: torch.compile(model, backend="eager", dynamic=True),
    "converted after": lambda model: autoprec.convert(torch.compile(Wrapper(model), backend="eager"), target="a100"),
    "in place": lambda model: (model.compile(backend="eager"), model)[1],
    "checkpoint": lambda model: torch.compile(
        lambda *args: checkpoint(model, *args, use_reentrant=False), backend="eager", fullgraph=True
    ),
    "checkpoint outside": lambda model: through_checkpoint(torch.compile(model, backend="eager"), False),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_bits(subject, way, tmp_path):
    model = converted(subject)
    want = run(model, model, subject.args())
    call, owner = WAYS[way](model, tmp_path)
    assert_same(run(call, owner, subject.args()), want)


@pytest.mark.parametrize("way", COMPILED_WAYS)
def test_every_compiled_way_gives_the_same_bits(subject, way):
    model = converted(subject)
    want = run(model, model, subject.args())
    assert_same(run(COMPILED_WAYS[way](model), model, subject.args()), want)


@pytest.mark.parametrize("way", MORE_COMPILED_WAYS)
def test_more_compiled_ways_give_the_same_bits(subjects, way):
    subject = subjects["vae"]
    model = converted(subject)
    want = run(model, model, subject.args())
    assert_same(run(MORE_COMPILED_WAYS[way](model), model, subject.args()), want)


@pytest.mark.parametrize("way", WAYS)
def test_every_eager_way_runs_the_same_gemms(subject, way, tmp_path, gemms):
    model = converted(subject)
    with torch.no_grad(), gemms() as want:
        model(*subject.args())
    assert want.dtypes == {BF16}
    call, _ = WAYS[way](model, tmp_path)
    with torch.no_grad(), gemms() as got:
        call(*subject.args())
    assert got.seen == want.seen


def test_backward_gemms_run_in_the_plans_format(subject, gemms):
    model = converted(subject)
    loss = sum((t * t).sum() for t in flat(model(*subject.args())))
    with gemms() as seen:
        loss.backward()
    assert seen.dtypes == {BF16}


def test_a_method_or_submodule_alone_gives_what_it_gives_inside(subject, gemms):
    model = converted(subject)
    args = subject.args()
    out = model(*args)
    for call, part in subject.entries.values():
        with gemms() as seen:
            alone = flat(call(model, *args))
        assert seen.dtypes == {BF16}
        for a, b in zip(alone, flat(part(out)), strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a, b)


def test_a_compiled_method_or_submodule_gives_what_it_gives_inside(subject):
    model = converted(subject)
    args = subject.args()
    out = model(*args)
    for call, part in subject.entries.values():
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        for a, b in zip(flat(compiled(model, *args)), flat(part(out)), strict=True):
            assert torch.equal(a, b)


def test_a_method_that_forward_never_calls_is_in_the_plan(subjects, gemms):
    model = converted(subjects["vae"])
    with gemms() as seen:
        out = model.embed(torch.randn(3, 12))
    assert out.dtype == torch.float32
    assert len(seen.seen) == 4
    assert seen.dtypes == {BF16}


@STRICT_EXPORT_WARNS
@pytest.mark.parametrize("strict", [True, False])
def test_exported_program_carries_the_plan(subject, strict):
    model = converted(subject).eval()
    args = subject.args()
    with torch.no_grad():
        want = flat(model(*args))
        program = torch.export.export(model, args, strict=strict)
        for a, b in zip(flat(program.module()(*args)), want, strict=True):
            assert torch.equal(a, b)
    operands = {
        arg.meta["val"].dtype
        for node in program.graph.nodes
        if str(node.target) in ("aten.linear.default", "aten.matmul.default", "aten.bmm.default", "aten.mm.default")
        for arg in node.args[:2]
    }
    assert operands == {BF16}


@STRICT_EXPORT_WARNS
@pytest.mark.parametrize("strict", [True, False])
def test_exported_wrapper_carries_the_plan(gpt, strict):
    model = converted(gpt).eval()
    args = gpt.args()
    with torch.no_grad():
        program = torch.export.export(Wrapper(model), args, strict=strict)
        assert torch.equal(program.module()(*args), model(*args))


def test_reentrant_checkpoint_gives_the_same_bits(subjects):
    for name in ("vae", "encoder-decoder", "functional"):
        subject = subjects[name]
        model = converted(subject)
        want = run(model, model, subject.args())
        assert_same(run(through_checkpoint(model, True), model, subject.args()), want)


def test_state_dict_goes_to_the_original_and_back(subject):
    plain, model = subject.model(), converted(subject)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.25)
    assert list(plain.state_dict()) == list(model.state_dict())
    plain.load_state_dict(model.state_dict())
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    fresh = converted(subject)
    fresh.load_state_dict(plain.state_dict())
    args = subject.args()
    for a, b in zip(flat(fresh(*args)), flat(model(*args)), strict=True):
        assert torch.equal(a, b)


def test_a_loaded_model_is_reverted_like_the_first(subject, tmp_path):
    model = autoprec.revert(roundtrip(converted(subject), tmp_path))
    args = subject.args()
    for a, b in zip(flat(model(*args)), flat(subject.model()(*args)), strict=True):
        assert torch.equal(a, b)


def test_gradients_are_within_bf16_of_fp32(subject):
    plain, model = subject.model(), converted(subject)
    want, got = run(plain, plain, subject.args()), run(model, model, subject.args())
    for name, gradient in want[1].items():
        assert (got[1][name] - gradient).norm() < 0.03 * gradient.norm(), name


def error(got, want):
    return float((got - want).norm() / want.norm())


@INDUCTOR_WARNS
@pytest.mark.slow
def test_inductor_agrees_within_its_own_rounding(subject):
    """The compiler leaves out roundings: that moves outputs and gradients by less than bf16 itself does."""
    plain, model = subject.model(), converted(subject)
    exact, want = run(plain, plain, subject.args()), run(model, model, subject.args())
    for emulate in (False, True):
        torch.compiler.reset()
        with torch._inductor.config.patch(emulate_precision_casts=emulate):
            got = run(torch.compile(model), model, subject.args())
        for a, b, c in zip(got[0], want[0], exact[0], strict=True):
            assert error(a, b) < 1.5 * error(b, c)
        for name, gradient in want[1].items():
            assert error(got[1][name], gradient) < 1.5 * error(gradient, exact[1][name]) + 1e-6, name


@INDUCTOR_WARNS
def test_inductor_is_really_used(gpt):
    from torch._inductor import metrics

    plain, model = gpt.model(), converted(gpt)
    args = gpt.args()
    metrics.reset()
    with torch.no_grad(), torch._inductor.config.patch(emulate_precision_casts=True, fx_graph_cache=False):
        exact, want = plain(*args), model(*args)
        got = torch.compile(model)(*args)
    assert metrics.generated_kernel_count > 0
    assert error(got, want) < error(want, exact)
