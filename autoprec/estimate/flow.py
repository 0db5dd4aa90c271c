"""In which format each tensor of a model is under a plan, and which casts that takes.

Follows the rules of a converted model: a matrix product gives its 16-bit format, an op with a format of its own gives
that, any other gives the widest format it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoprec.analyze import SiteReport
from autoprec.estimate.roofline import bytes_of
from autoprec.graph.site import Site
from autoprec.plan import Formats

#: What a plan asks of a site; None where it follows what it reads.
FormatsOf = Callable[[Site], Formats | None]

#: Ops that give another view of what they read.
VIEWS = frozenset({
    "view", "permute", "transpose", "unbind", "expand", "expand_as", "view_as", "squeeze", "unsqueeze", "flatten",
    "unflatten", "chunk", "split", "tensor_split", "narrow", "select", "index", "movedim", "swapaxes", "swapdims", "T",
    "t", "mT", "detach", "diagonal", "unfold", "as_strided", "contiguous", "reshape", "alias",
})  # fmt: skip

#: Views that copy what was permuted before them.
_COPIES = frozenset({"contiguous", "reshape", "flatten"})
_PERMUTES = frozenset({"permute", "transpose", "movedim", "swapaxes", "swapdims", "T", "t", "mT"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """One tensor that a site reads in another format than it is in."""

    producer: str
    numel: int
    source: str
    format: str

    @property
    def num_bytes(self) -> float:
        """Of the copy."""
        return self.numel * bytes_of(self.format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A site under a plan.

    Args:
        site: the site.
        formats: of its operands, by role.
        output: format of its result.
        reads: ids of the sites whose storage its activations are in, views looked through.
        casts: of activations.
        is_view: it computes nothing.
    """

    site: Site
    formats: Formats
    output: str
    reads: tuple[str, ...]
    casts: tuple[Cast, ...]
    is_view: bool

    @property
    def output_numel(self) -> int:
        return sum(math.prod(shape) for shape in self.site.output_shapes)

    @property
    def input_numel(self) -> int:
        """Elements of its activations, parameters left out."""
        return max(0, sum(math.prod(shape) for shape in self.site.input_shapes) - self.site.num_params)


def place(rows: Sequence[SiteReport], formats_of: FormatsOf, low: str) -> list[Placed]:
    """The sites under a plan, in order of execution.

    Args:
        rows: of an analysis with example inputs: sites and which reads which.
        formats_of: what the plan asks of a site.
        low: the plan's 16-bit format, in which products narrower than that give their result.
    """
    placed: dict[str, Placed] = {}
    permuted: set[str] = set()
    for row in rows:
        item = _place(row, formats_of, low, placed, permuted)
        placed[row.site.id] = item
        if row.site.op in _PERMUTES or (item.is_view and any(p in permuted for p in row.producers)):
            permuted.add(row.site.id)
    return list(placed.values())


def _place(row: SiteReport, formats_of: FormatsOf, low: str, placed: dict[str, Placed], permuted: set[str]) -> Placed:
    site = row.site
    read = [placed[name] for name in row.producers if name in placed]
    asked = formats_of(site)
    widest = max((item.output for item in read), key=_width, default="fp32")
    if asked is None or asked.input in ("follow", "fixed"):
        # parameters are fp32, and promote what they are added to; a batch norm's kernel gives what it reads
        asked = Formats.all("fp32" if site.num_params and not site.is_gemm and site.op != "batch_norm" else widest)
    narrow = bytes_of(asked.input) < 2
    operand = low if narrow else asked.input
    is_view = site.op in VIEWS
    copies = site.op in _COPIES and any(name in permuted for name in row.producers)
    return Placed(
        site=site,
        formats=asked,
        output=widest if is_view else operand,
        reads=tuple(root for item in read for root in (item.reads if item.is_view else (item.site.id,))),
        casts=() if is_view else tuple(_casts(read, operand)),
        is_view=is_view and not copies,
    )


def _casts(read: list[Placed], operand: str) -> list[Cast]:
    """Casts of activations; a follower that mixes formats promotes inside its kernel, and casts as much."""
    return [
        Cast(producer=item.site.id, numel=item.output_numel, source=item.output, format=operand)
        for item in read
        if _width(item.output) != _width(operand) or {item.output, operand} == {"bf16", "fp16"}
    ]


def _width(format_name: str) -> float:
    return bytes_of(format_name)
