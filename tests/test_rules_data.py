"""The shipped rules against torch itself: what is said to run in 16 bit runs, what is said to need one dtype does."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autoprec.graph.site import GEMM_OPS
from autoprec.rulebook import canonical_op, known_ops, load_rulebook

RULES = load_rulebook()
HALF = (torch.bfloat16, torch.float16)

SOURCE = re.compile(r"https://\S+|[\w.-]+/[\w.-]+#\d+")


def test_every_rule_has_a_reason_and_a_public_source():
    rows = [(rule.op, rule.why, rule.source) for rule in RULES.ops.values()]
    rows += [(family.name, family.why, family.source) for family in RULES.families.values()]
    rows += [(family.name, keep.why, keep.source) for family in RULES.families.values() for keep in family.keep]
    rows += [("scaler", prior.why, prior.source) for prior in RULES.scaler]
    for name, why, source in rows:
        assert len(why) > 15, name
        assert all(SOURCE.fullmatch(part) for part in source.split("; ")), (name, source)


def test_every_gemm_is_low():
    assert {op for op in GEMM_OPS if RULES.rule_for(op).kind != "low"} == set()


def test_names_are_known_to_torch():
    # private ops reach a function mode, but torch.overrides doesn't list them
    unknown = {op for op in RULES.ops if op not in known_ops() and not op.startswith("_")}
    assert unknown == {"multi_dot", "nll_loss_nd", "segment_reduce", "sparse_sampled_addmm"}
    in_families = {op for family in RULES.families.values() for op in family.ops}
    in_families |= {op for family in RULES.families.values() for keep in family.keep for op in keep.ops}
    assert in_families <= RULES.ops.keys()


class Names(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(canonical_op(func.__name__))
        return func(*args, **(kwargs or {}))


def values(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def mask(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 2 == 0


#: Op → a call of it for tensors of a dtype ``d``.
CALLS = {
    "linear": lambda d: F.linear(values(2, 4, dtype=d), values(3, 4, dtype=d), values(3, dtype=d)),
    "matmul": lambda d: values(2, 4, dtype=d) @ values(4, 2, dtype=d),
    "bmm": lambda d: torch.bmm(values(2, 3, 4, dtype=d), values(2, 4, 3, dtype=d)),
    "mv": lambda d: torch.mv(values(2, 4, dtype=d), values(4, dtype=d)),
    "addmm": lambda d: torch.addmm(values(2, dtype=d), values(3, 4, dtype=d), values(4, 2, dtype=d)),
    "baddbmm": lambda d: torch.baddbmm(values(1, 3, 3, dtype=d), values(2, 3, 4, dtype=d), values(2, 4, 3, dtype=d)),
    "einsum": lambda d: torch.einsum("ij,jk", values(2, 4, dtype=d), values(4, 2, dtype=d)),
    "tensordot": lambda d: torch.tensordot(values(2, 4, dtype=d), values(4, 2, dtype=d), 1),
    "inner": lambda d: torch.inner(values(2, 4, dtype=d), values(3, 4, dtype=d)),
    "bilinear": lambda d: F.bilinear(values(2, 3, dtype=d), values(2, 4, dtype=d), values(5, 3, 4, dtype=d)),
    "linalg_multi_dot": lambda d: torch.linalg.multi_dot([values(2, 3, dtype=d), values(3, 4, dtype=d)]),
    "conv1d": lambda d: F.conv1d(values(1, 2, 8, dtype=d), values(3, 2, 3, dtype=d)),
    "conv2d": lambda d: F.conv2d(values(1, 2, 8, 8, dtype=d), values(3, 2, 3, 3, dtype=d)),
    "conv3d": lambda d: F.conv3d(values(1, 2, 4, 4, 4, dtype=d), values(3, 2, 3, 3, 3, dtype=d)),
    "conv_transpose2d": lambda d: F.conv_transpose2d(values(1, 2, 4, 4, dtype=d), values(2, 3, 3, 3, dtype=d)),
    "scaled_dot_product_attention": lambda d: F.scaled_dot_product_attention(*[values(1, 2, 4, 8, dtype=d)] * 3),
    "lstm": lambda d: torch.nn.LSTM(4, 4).to(d)(values(3, 2, 4, dtype=d))[0],
    "gru": lambda d: torch.nn.GRU(4, 4).to(d)(values(3, 2, 4, dtype=d))[0],
    "gru_cell": lambda d: torch.nn.GRUCell(4, 4).to(d)(values(2, 4, dtype=d)),
    "relu": lambda d: F.relu(values(4, dtype=d)),
    "gelu": lambda d: F.gelu(values(4, dtype=d)),
    "silu": lambda d: F.silu(values(4, dtype=d)),
    "mish": lambda d: F.mish(values(4, dtype=d)),
    "sigmoid": lambda d: values(4, dtype=d).sigmoid(),
    "tanh": lambda d: torch.tanh(values(4, dtype=d)),
    "hardswish": lambda d: F.hardswish(values(4, dtype=d)),
    "elu": lambda d: F.elu(values(4, dtype=d)),
    "glu": lambda d: F.glu(values(4, dtype=d)),
    "add": lambda d: values(4, dtype=d) + values(4, dtype=torch.float32),
    "mul": lambda d: 2 * values(4, dtype=d),
    "sub": lambda d: 1 - values(4, dtype=d),
    "div": lambda d: 1 / (values(4, dtype=d).abs() + 1),
    "sqrt": lambda d: values(4, dtype=d).abs().sqrt(),
    "erf": lambda d: torch.erf(values(4, dtype=d)),
    "where": lambda d: torch.where(mask(4), values(4, dtype=d), values(4)),
    "cat": lambda d: torch.cat([values(4, dtype=d), values(4)]),
    "stack": lambda d: torch.stack([values(4, dtype=d), values(4)]),
    "maximum": lambda d: torch.maximum(values(4, dtype=d), values(4)),
    "addcmul": lambda d: torch.addcmul(values(4), values(4, dtype=d), values(4, dtype=d)),
    "addcdiv": lambda d: torch.addcdiv(values(4, dtype=d), values(4), values(4).abs() + 1),
    "atan2": lambda d: torch.atan2(values(4, dtype=d), values(4)),
    "outer": lambda d: torch.outer(values(4, dtype=d), values(4)),
    "addr": lambda d: torch.addr(values(4, 4), values(4, dtype=d), values(4)),
    "copysign": lambda d: torch.copysign(values(4, dtype=d), values(4)),
    "remainder": lambda d: values(4, dtype=d) % 2,
    "clamp": lambda d: values(4, dtype=d).clamp(-1, 1),
    "masked_fill": lambda d: values(4, dtype=d).masked_fill_(mask(4), -1.0),
    "amax": lambda d: values(4, dtype=d).amax(),
    "topk": lambda d: values(8, dtype=d).topk(2)[0],
    "sort": lambda d: values(8, dtype=d).sort()[0],
    "cummax": lambda d: values(8, dtype=d).cummax(0)[0],
    "max_pool2d": lambda d: F.max_pool2d(values(1, 2, 8, 8, dtype=d), 2),
    "avg_pool2d": lambda d: F.avg_pool2d(values(1, 2, 8, 8, dtype=d), 2),
    "adaptive_avg_pool2d": lambda d: F.adaptive_avg_pool2d(values(1, 2, 8, 8, dtype=d), 1),
    "embedding": lambda d: F.embedding(torch.arange(3), values(4, 4, dtype=d)),
    "gather": lambda d: values(4, dtype=d).gather(0, torch.arange(2)),
    "index": lambda d: values(4, dtype=d)[mask(4)],
    "pad": lambda d: F.pad(values(1, 4, dtype=d), (1, 1), mode="reflect"),
    "pixel_shuffle": lambda d: F.pixel_shuffle(values(1, 4, 2, 2, dtype=d), 2),
    "fold": lambda d: F.fold(values(1, 4, 9, dtype=d), (4, 4), 2),
    "dropout": lambda d: F.dropout(values(4, dtype=d), 0.0),
    "fft_fftshift": lambda d: torch.fft.fftshift(values(4, dtype=d)),
}

#: Op → a call that mixes fp32 and ``d``, which torch refuses.
MIXED = {
    "dot": lambda d: torch.dot(values(4), values(4, dtype=d)),
    "vdot": lambda d: torch.vdot(values(4), values(4, dtype=d)),
    "cross": lambda d: torch.cross(values(2, 3), values(2, 3, dtype=d), dim=1),
    "lerp": lambda d: torch.lerp(values(4), values(4, dtype=d), 0.5),
    "heaviside": lambda d: torch.heaviside(values(4), values(4, dtype=d)),
    "meshgrid": lambda d: torch.meshgrid(values(4), values(4, dtype=d), indexing="ij"),
    "cartesian_prod": lambda d: torch.cartesian_prod(values(4), values(4, dtype=d)),
    "allclose": lambda d: torch.allclose(values(4), values(4, dtype=d)),
    "prelu": lambda d: F.prelu(values(2, 4, dtype=d), values(1)),
    "grid_sample": lambda d: F.grid_sample(
        values(1, 1, 4, 4, dtype=d), values(1, 2, 2, 2), align_corners=False
    ),
    "embedding_bag": lambda d: F.embedding_bag(
        mask(1, 2).long(), values(3, 2), per_sample_weights=values(1, 2, dtype=d), mode="sum"
    ),
    "scatter": lambda d: values(4).scatter(0, torch.arange(2), values(2, dtype=d)),
    "scatter_add": lambda d: values(4).scatter_add_(0, torch.arange(2), values(2, dtype=d)),
    "scatter_reduce": lambda d: values(4).scatter_reduce(0, torch.arange(2), values(2, dtype=d), "amax"),
    "index_add": lambda d: values(4).index_add_(0, torch.arange(2), values(2, dtype=d)),
    "index_copy": lambda d: values(4).index_copy(0, torch.arange(2), values(2, dtype=d)),
    "index_put": lambda d: values(4).__setitem__(torch.arange(2), values(2, dtype=d)),
    "masked_scatter": lambda d: values(4).masked_scatter(mask(4), values(4, dtype=d)),
    "put": lambda d: values(4).put(torch.arange(2), values(2, dtype=d)),
}  # fmt: skip

#: Op → a call that has no 16-bit kernel on a CPU.
KERNELLESS = {
    "fft_rfft": lambda d: torch.fft.rfft(values(6, dtype=d)),
    "stft": lambda d: torch.stft(values(64, dtype=d), 16, window=values(16, dtype=d), return_complex=True),
    "linalg_qr": lambda d: torch.linalg.qr(values(3, 3, dtype=d)),
    "linalg_svdvals": lambda d: torch.linalg.svdvals(values(3, 3, dtype=d)),
    "linalg_inv": lambda d: torch.inverse(values(3, 3, dtype=d)),
    "linalg_solve_triangular": lambda d: torch.linalg.solve_triangular(
        values(2, 2, dtype=d).tril(), values(2, 1, dtype=d), upper=False
    ),
    "cdist": lambda d: torch.cdist(values(2, 3, dtype=d), values(2, 3, dtype=d)),
    "ctc_loss": lambda d: F.ctc_loss(
        values(5, 1, 4, dtype=d), torch.ones(1, 2, dtype=torch.long), torch.tensor([5]), torch.tensor([2])
    ),
    "quantile": lambda d: torch.quantile(values(4, dtype=d), 0.5),
    "histogram": lambda d: torch.histogram(values(4, dtype=d), 3),
    "avg_pool3d": lambda d: F.avg_pool3d(values(1, 1, 4, 4, 4, dtype=d), 2),
    "multi_margin_loss": lambda d: F.multi_margin_loss(values(2, 3, dtype=d), torch.tensor([0, 1])),
    "special_bessel_j0": lambda d: torch.special.bessel_j0(values(4, dtype=d)),
}  # fmt: skip


@pytest.mark.parametrize("op", CALLS)
def test_low_and_follow_ops_run_in_16_bit(op):
    assert RULES.rule_for(op).kind in ("low", "follow")
    for dtype in HALF:
        with Names() as names:
            result = CALLS[op](dtype)
        assert op in names.seen
        assert result.isfinite().all()


@pytest.mark.parametrize("op", MIXED)
def test_fixed_ops_refuse_mixed_dtypes(op):
    assert RULES.rule_for(op).kind == "fixed"
    for dtype in HALF:
        with Names() as names, pytest.raises((RuntimeError, IndexError)):
            MIXED[op](dtype)
        assert op in names.seen
        MIXED[op](torch.float32)


@pytest.mark.parametrize("op", KERNELLESS)
def test_fp32_ops_without_a_16_bit_kernel(op):
    assert RULES.rule_for(op).kind == "fp32"
    with Names() as names, pytest.raises((RuntimeError, NotImplementedError)):
        KERNELLESS[op](torch.bfloat16)
    assert op in names.seen
    KERNELLESS[op](torch.float32)


ELEMENTWISE = ["relu", "gelu", "silu", "mish", "sigmoid", "tanh", "hardswish", "elu", "sqrt", "erf", "avg_pool2d"]


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_ops_that_follow_round_once(op):
    exact = CALLS[op](torch.float32)
    for dtype in HALF:
        # the inputs are rounded too, so that two half steps are the least that can be asked
        torch.testing.assert_close(CALLS[op](dtype).float(), exact, rtol=2 * torch.finfo(dtype).eps, atol=4e-3)


@pytest.mark.parametrize("dtype", HALF)
def test_positions_need_the_factory_guard(dtype):
    assert RULES.rule_for("arange").guard == "factory"
    assert torch.arange(3000, dtype=dtype).long().unique().numel() < 3000


@pytest.mark.parametrize("op", ["masked_fill", "index_fill", "fill", "full_like"])
def test_fills_are_guarded(op):
    assert RULES.rule_for(op).guard == "fill"
    with pytest.raises(RuntimeError, match="overflow"):
        values(4, dtype=torch.float16).masked_fill(mask(4), -1e9)


def test_scaler_priors_are_ordered_and_start_inside_their_range():
    settings = [prior.settings for prior in RULES.scaler]
    assert [s.init_scale for s in settings] == sorted(s.init_scale for s in settings)
    assert RULES.scaler[-1].below_params == float("inf")
    for s in settings:
        torch.amp.GradScaler(
            "cpu", init_scale=s.init_scale, growth_factor=s.growth_factor, backoff_factor=s.backoff_factor,
            growth_interval=s.growth_interval,
        )  # fmt: skip
