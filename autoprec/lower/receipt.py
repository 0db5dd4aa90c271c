"""The receipt: what each site asked for, what it got, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

#: A receipt row for formats narrower than fp32.
_FULL = ("fp32", "tf32", "fp64", "follow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One site.

    Args:
        site: site id.
        op: canonical op name.
        asked: format the plan asks for; ``follow`` if no rule takes the site.
        got: dtype or format it really ran in at the recorded call; ``""`` if it hasn't run yet, unless no backend
            takes it, so that what it will run in is known already.
        why: the plan's reason, or why it got something else.
        mechanism: ``frame``, ``backend:<name>``, ``fp32`` or ``none``.
        flops: of one forward, for GEMMs.
    """

    site: str
    op: str
    asked: str
    got: str
    why: str
    mechanism: str
    flops: int = 0

    @property
    def kept(self) -> bool:
        """Whether the site got what was asked."""
        return not self.got or self.asked in ("follow", self.got)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a conversion did.

    Args:
        rows: one per recorded site, in order of first call; one per GEMM layer, with the backend that will take it,
            if nothing was recorded yet.
        notes: what concerns the whole model (memory of kept weights, modules that can't be converted).
        recorded: the rows come from a real call of the converted model.
        extra_bytes: memory the conversion keeps beside the model's own.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    recorded: bool = False
    extra_bytes: int = 0

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, site: str) -> Row:
        for row in self.rows:
            if row.site == site:
                return row
        raise KeyError(site)

    @property
    def low_precision_share(self) -> float:
        """The part of matmul and convolution FLOPs that runs below fp32, 0 to 1; NaN before the first recorded call."""
        total = sum(row.flops for row in self.rows)
        low = sum(row.flops for row in self.rows if row.got and row.got not in _FULL)
        return low / total if total else float("nan")

    @property
    def refused(self) -> tuple[Row, ...]:
        """Sites that didn't get what the plan asked."""
        return tuple(row for row in self.rows if not row.kept)

    def to_json(self) -> dict[str, Any]:
        share = self.low_precision_share
        return {
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
            "recorded": self.recorded,
            "low_precision_share": None if share != share else share,
            "extra_bytes": self.extra_bytes,
        }

    def __str__(self) -> str:
        share = self.low_precision_share
        head = "no call recorded yet" if share != share else f"{share:.1%} of GEMM FLOPs below fp32"
        return f"Receipt({len(self.rows)} sites, {head}, {len(self.refused)} not as asked)"
