"""Range and cancellation: blames sites for errors measured on real data."""

from __future__ import annotations

import math

from autoprec.analyze.errors import MARK
from autoprec.analyze.facts import Graph, SiteFacts
from autoprec.analyze.findings import Findings
from autoprec.analyze.ops import NORMS, PHASES
from autoprec.analyze.shadow import Outcome
from autoprec.formats import Format

#: Relative L2 error of one site beyond which the format is blamed.  Products and elementwise chains of well-scaled data
#: stay below 5e-3 in bf16 and 7e-4 in fp16.
MAX_ERROR = {"bf16": 2e-2, "fp16": 1e-2}

#: The same for the result of an fp32 op on 16-bit inputs: exponentials and norms amplify a rounding several times, and
#: models are trained that way.
MAX_AMPLIFIED_ERROR = {"bf16": 0.15, "fp16": 0.075}

#: A result must stay this factor below the largest finite value, since other data will be larger.
HEAD_ROOM = {"training": 4.0, "inference": 2.0}

#: Elements below which a chance cancellation makes the error of the whole result large.
_FEW = 64

#: Roundings in a row from which on their sum is allowed to be larger.
_LONG = 16


class RangeJudge:
    """Judges each site's outcome under one format, and blames the sites that caused what is wrong with it."""

    def __init__(self, fmt: Format, mode: str, graph: Graph, findings: Findings, kinds: dict[str, str]) -> None:
        self._fmt, self._graph, self._findings = fmt, graph, findings
        self._limit = fmt.max / HEAD_ROOM[mode]
        self._kinds = kinds

    def __call__(self, facts: SiteFacts, outcome: Outcome) -> bool:
        """Whether the site's result must be taken as fp32 from here on."""
        kind = self._kinds.get(facts.op, "follow")
        if kind == "fp32":
            return self._judge_wide(facts, outcome)
        if kind == "low":
            return self._judge_product(facts, outcome)
        return self._judge_following(facts, outcome)

    def _judge_product(self, facts: SiteFacts, outcome: Outcome) -> bool:
        if facts.max_abs > self._limit:
            self._keep(facts.site.id, self._beyond(facts))
            return True
        if outcome.low <= self._bound(facts, MAX_ERROR):
            return False
        self._keep(facts.site.id, f"its operands rounded to {self._fmt} give {_wrong(outcome.low)}")
        for culprit in outcome.chain:  # casting rounded operands up again would not bring back what they lost
            self._keep(culprit, f"its result rounded to {self._fmt} gives {_wrong(outcome.low)} in {facts.site.id}")
        return True

    def _judge_following(self, facts: SiteFacts, outcome: Outcome) -> bool:
        bound = self._bound(facts, MAX_AMPLIFIED_ERROR if facts.op in NORMS else MAX_ERROR)
        # A residual stream rounds once a block: errors that add up like noise aren't one site's fault.
        bound *= math.sqrt(1 + len(outcome.chain) / _LONG)
        if self._fmt.name in facts.lows and self._limit < facts.max_abs < MARK:
            self._keep(facts.site.id, self._beyond(facts))
            return True
        if outcome.low <= bound:
            return False
        if outcome.unrounded <= bound or _is_curable(outcome, bound):
            self._keep(facts.site.id, self._what(facts, outcome))
        if outcome.unrounded > bound:
            self._blame(facts, outcome, bound)
        return True

    def _judge_wide(self, facts: SiteFacts, outcome: Outcome) -> bool:
        bound = self._bound(facts, MAX_ERROR if facts.op in PHASES else MAX_AMPLIFIED_ERROR)
        if outcome.low > bound:
            self._blame(facts, outcome, bound)
        return True

    def _blame(self, facts: SiteFacts, outcome: Outcome, bound: float) -> None:
        """Charges the sites that made what this one reads: those between, if that helps, else the products."""
        where = f"the {facts.op} at {facts.site.id}"
        for culprit in outcome.chain if _is_curable(outcome, bound) else outcome.roots:
            self._keep(culprit, f"{self._fmt} rounds what it makes, and {where} turns that into {_wrong(outcome.low)}")

    def _what(self, facts: SiteFacts, outcome: Outcome) -> str:
        beyond = [c for c in facts.numbers if abs(c) > self._fmt.max]
        if beyond:
            return f"its constant {beyond[0]:g} is beyond {self._fmt}, which ends at {self._fmt.max:g}"
        if facts.max_abs > self._fmt.max:
            return self._beyond(facts)
        return f"with its inputs and result in {self._fmt} it gives {_wrong(outcome.low)}"

    def _beyond(self, facts: SiteFacts) -> str:
        return f"its result reaches {facts.max_abs:.3g} and {self._fmt} ends at {self._fmt.max:g}"

    def _bound(self, facts: SiteFacts, bounds: dict[str, float]) -> float:
        elements = sum(math.prod(shape) for shape in facts.site.output_shapes)
        return bounds[self._fmt.name] * (4.0 if elements < _FEW else 1.0)

    def _keep(self, site_id: str, reason: str) -> None:
        self._findings.keep(site_id, self._fmt.name, "range", reason)


def _is_curable(outcome: Outcome, bound: float) -> bool:
    """Whether fp32 between the matrix products and here would help."""
    return outcome.wide <= bound or outcome.wide < outcome.low / 4


def _wrong(error: float) -> str:
    return "infinities or NaN" if math.isinf(error) else f"a relative error of {error:.2g}"
