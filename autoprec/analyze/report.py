"""What an analysis says: one row a site."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from autoprec.errors import UsageError
from autoprec.graph.site import Site

Tag = Literal["fp32", "low", "follow"]
Source = Literal["op", "pattern", "provenance", "range", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one site needs under one 16-bit format.

    Args:
        tag: ``fp32``; ``low``: the format; ``follow``: what its inputs come in.
        source: what decided.
        reason: one sentence a person can act on.
    """

    tag: Tag
    source: Source
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """One site.

    Args:
        site: with shapes and FLOPs.
        verdicts: by 16-bit format.
        max_abs: largest finite magnitude of its results in fp32; None where no values were seen.
        errors: format → relative L2 error of its result when it runs low, with the roundings since the last matrix
            product; infinite where the format gives infinities or NaN.  Absent where it wasn't measured.
        gradient_errors: format → relative L2 error of its parameters' gradient; see ``gradients=`` of ``analyze``.
        producers: ids of the sites whose results it reads.
        consumers: ids of the sites that read its result.
    """

    site: Site
    verdicts: Mapping[str, Verdict]
    max_abs: float | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    gradient_errors: Mapping[str, float] = field(default_factory=dict)
    producers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()

    @property
    def strictest(self) -> Verdict:
        """The verdict that asks for most: fp32 before others, and what was found before op rules."""
        return max(self.verdicts.values(), key=lambda v: (v.tag == "fp32", v.source != "op"))

    @property
    def tag(self) -> Tag:
        return self.strictest.tag

    @property
    def source(self) -> Source:
        return self.strictest.source

    @property
    def reason(self) -> str:
        return self.strictest.reason

    def verdict(self, format_name: str) -> Verdict:
        """The verdict for a format.

        Raises:
            UsageError: it wasn't analysed for that format.
        """
        if format_name not in self.verdicts:
            known = ", ".join(self.verdicts)
            raise UsageError(
                f"{format_name!r} wasn't analysed, only {known}; pass formats=({format_name!r},) to analyze"
            )
        return self.verdicts[format_name]

    def tag_for(self, format_name: str) -> Tag:
        return self.verdict(format_name).tag

    def source_for(self, format_name: str) -> Source:
        return self.verdict(format_name).source

    def reason_for(self, format_name: str) -> str:
        return self.verdict(format_name).reason

    def to_json(self) -> dict[str, Any]:
        """As JSON values; an infinite error is the string ``"inf"``."""
        return {
            "site": self.site.id,
            "op": self.site.op,
            "input_shapes": [list(s) for s in self.site.input_shapes],
            "output_shapes": [list(s) for s in self.site.output_shapes],
            "flops": self.site.flops,
            "num_params": self.site.num_params,
            "verdicts": {
                name: {"tag": v.tag, "source": v.source, "reason": v.reason} for name, v in self.verdicts.items()
            },
            "max_abs": self.max_abs,
            "errors": {name: _number(error) for name, error in self.errors.items()},
            "gradient_errors": {name: _number(error) for name, error in self.gradient_errors.items()},
            "producers": list(self.producers),
            "consumers": list(self.consumers),
        }


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The sensitivity of a model's sites.

    Args:
        rows: in order of first call.
        formats: 16-bit formats analysed.
        target: name of the target.
        low_format: the 16-bit format of that target; the default of :meth:`tags`.
        is_measured: example inputs were run; without them only op rules speak.
        refused: FQN → why that module couldn't be watched.
    """

    rows: tuple[SiteReport, ...]
    formats: tuple[str, ...]
    target: str
    low_format: str
    is_measured: bool
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(row.site for row in self.rows)

    @cached_property
    def by_id(self) -> dict[str, SiteReport]:
        """Site id → row."""
        return {row.site.id: row for row in self.rows}

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """(producer, consumer) site ids."""
        return tuple((row.site.id, consumer) for row in self.rows for consumer in row.consumers)

    def tags(self, format_name: str | None = None) -> dict[str, Tag]:
        """Site id → tag under a format, by default the target's."""
        return {row.site.id: row.tag_for(format_name or self.low_format) for row in self.rows}

    def low_flops_share(self, format_name: str | None = None) -> float:
        """Share of the matrix products' FLOPs that may run in the format; 1.0 without any."""
        tags = self.tags(format_name)
        total = sum(site.flops for site in self.sites)
        low = sum(site.flops for site in self.sites if tags[site.id] == "low")
        return low / total if total else 1.0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "target": self.target,
            "low_format": self.low_format,
            "formats": list(self.formats),
            "is_measured": self.is_measured,
            "refused": dict(self.refused),
            "rows": [row.to_json() for row in self.rows],
        }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
