"""What the analysis found against the op rules."""

from __future__ import annotations

from collections.abc import Iterator

from autoprec.analyze.report import Source, Verdict

#: Of two findings for one site the more telling is shown.
_ORDER: dict[Source, int] = {"pattern": 0, "provenance": 1, "range": 2, "gradient": 3, "op": 4}


class Findings:
    """Sites that need fp32, by format, each with its reason."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Verdict] = {}

    def keep(self, site_id: str, format_name: str, source: Source, reason: str) -> None:
        """The site needs fp32 under the format."""
        before = self._found.get((site_id, format_name))
        if before is None or _ORDER[source] < _ORDER[before.source]:
            self._found[site_id, format_name] = Verdict(tag="fp32", source=source, reason=reason)

    def get(self, site_id: str, format_name: str) -> Verdict | None:
        return self._found.get((site_id, format_name))

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._found

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._found)
