"""How many bytes a training or inference step of a plan holds at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.analyze import SiteReport
from autoprec.estimate.estimate import Estimate
from autoprec.estimate.flow import FormatsOf, Placed, place
from autoprec.estimate.roofline import bytes_of
from autoprec.plan import Mode

#: Ops whose backward needs nothing that was computed.
_SAVES_NOTHING = frozenset({
    "add", "sub", "neg", "sum", "mean", "cat", "stack", "embedding", "pad", "masked_fill", "to", "float", "type_as",
    "adaptive_avg_pool2d", "avg_pool2d", "roll", "flip", "repeat", "getitem",
})  # fmt: skip

#: Ops whose backward needs their result, and not what they read.
_SAVES_OUTPUT = frozenset({"relu", "sigmoid", "tanh", "softmax", "log_softmax", "exp", "sqrt", "rsqrt", "dropout"})

#: Ops whose backward needs both.
_SAVES_BOTH = frozenset({"scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu", "cross_entropy"})

ASSUMPTIONS = (
    "no activation checkpointing; gradients are freed after each step; parameters and gradients are stored in fp32",
    "the loss keeps one fp32 copy of the model's output and makes another as its gradient",
    "the allocator's own rounding and a kernel's workspace aren't counted",
)


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory that outlives the op that made it."""

    name: str
    num_bytes: float


def estimate_memory(
    rows: Sequence[SiteReport],
    formats_of: FormatsOf,
    *,
    num_params: int,
    low: str,
    mode: Mode = "training",
    optimizer_bytes: float = 8.0,
) -> Estimate:
    """Peak bytes of one step: parameters, optimizer state, and what the step holds at once beside them.

    Args:
        rows: of an analysis with example inputs, whose shapes count.
        formats_of: what the plan asks of a site; None where it follows what it reads.
        num_params: of the model, each counted once.
        low: the plan's 16-bit format, ``fp32`` if it has none.
        mode: ``inference`` keeps cast weights, and no activation longer than it is needed.
        optimizer_bytes: state a parameter: 8 for Adam, 4 for momentum, 0 for plain SGD.
    """
    placed = place(rows, formats_of, low)
    parts: dict[str, float] = {"parameters": 4.0 * num_params}
    if mode == "inference":
        parts |= {"low copies": sum(_weight_copy(item) for item in placed), "activations": _widest(placed)}
    else:
        parts["optimizer"] = optimizer_bytes * num_params
        parts |= _training_peak(placed, num_params)
    return Estimate(value=sum(parts.values()), unit="bytes", parts=parts, assumptions=ASSUMPTIONS)


def _widest(placed: Sequence[Placed]) -> float:
    """What one op reads, its casts and its result."""
    return max(
        (item.input_numel * bytes_of(item.output) + _output_bytes(item) + sum(c.num_bytes for c in item.casts))
        for item in placed
    )


def _training_peak(placed: Sequence[Placed], num_params: int) -> dict[str, float]:
    """The fullest moment of a step: after the forward, inside the backward, or in the update."""
    by_id = {item.site.id: item for item in placed}
    saved: dict[str, float] = {}
    first: list[list[str]] = []  # storages that each site is the first to save, freed when its backward is done
    for item in placed:
        new = {s.name: s.num_bytes for s in _saved(item, by_id) if s.name not in saved}
        saved |= new
        first.append(list(new))
    copies = {item.site.module: _weight_copy(item) for item in placed}
    logits = placed[-1].output_numel * 4.0
    live = {"activations": sum(saved.values()) + logits, "low copies": sum(copies.values()), "gradients": logits}
    peak = dict(live)
    live["activations"] -= logits
    live["gradients"] = 0.0
    counted: set[str] = set()
    for item, names in zip(reversed(placed), reversed(first), strict=True):
        fresh = item.site.module not in counted
        counted.add(item.site.module)
        gradient = 4.0 * item.site.num_params if fresh else 0.0
        passing = _passing_bytes(item)
        now = {**live, "gradients": live["gradients"] + gradient + passing}
        peak = max(peak, now, key=lambda parts: sum(parts.values()))
        live["gradients"] += gradient
        live["activations"] -= sum(saved[name] for name in names)
        live["low copies"] -= copies.pop(item.site.module, 0.0)
    largest = max((item.site.num_params for item in placed), default=0)
    update = {"activations": 0.0, "low copies": 0.0, "gradients": 4.0 * num_params + 8.0 * largest}
    return max(peak, update, key=lambda parts: sum(parts.values()))


def _saved(item: Placed, by_id: dict[str, Placed]) -> list[Storage]:
    """What the site keeps for its backward; what several keep is counted by its name once."""
    op = item.site.op
    if item.is_view or op in _SAVES_NOTHING:
        return []
    if bytes_of(item.formats.input) < 2:  # the codes, and the weight itself
        return [Storage(f"{item.site.id} codes", item.input_numel * bytes_of(item.formats.input))]
    output = Storage(item.site.id, _output_bytes(item))
    if op in _SAVES_OUTPUT:
        return [output]
    cast = {c.producer for c in item.casts}
    inputs = [Storage(f"{item.site.id} < {c.producer}", c.num_bytes) for c in item.casts]
    inputs += [Storage(name, _output_bytes(by_id[name])) for name in item.reads if name not in cast]
    return [*inputs, output] if op in _SAVES_BOTH else inputs


def _weight_copy(item: Placed) -> float:
    """The 16-bit copy of a product's weight; codes of a narrower one are made again when they are needed."""
    return item.site.num_params * 2.0 if item.site.is_gemm and bytes_of(item.formats.input) == 2 else 0.0


def _output_bytes(item: Placed) -> float:
    return item.output_numel * bytes_of(item.output)


def _passing_bytes(item: Placed) -> float:
    """Gradients in flight: of the result, of what was read, of the casts, and of a weight before it is fp32 again."""
    passing = (item.output_numel + item.input_numel) * bytes_of(item.output)
    passing += sum(c.numel * bytes_of(c.source) for c in item.casts)
    return passing + _weight_copy(item)
