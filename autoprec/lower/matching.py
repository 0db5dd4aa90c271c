"""Which plan rule a site falls under, fast for thousands of rules and modules.

A glob with ``::`` names ops (``*::softmax``, ``blocks.3.attn::matmul#0``).  A glob without it names modules and stands
for every GEMM in them; for every op if its format is fp32, since what is pinned to fp32 is pinned whole.
"""

from __future__ import annotations

import fnmatch
import functools
import heapq
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoprec.graph.site import GEMM_OPS
from autoprec.plan import Plan, PlanRule

_WILD = re.compile(r"[*?\[]")


class OpGlob(NamedTuple):
    """The part of a rule that concerns one module: which of its ops the rule takes."""

    rule: int
    op: str | None  # None: the glob names modules
    call: int | None  # None: every call of the op


@dataclass(frozen=True)
class _Glob:
    scope: str
    op: OpGlob

    @classmethod
    def parse(cls, rule: int, text: str) -> _Glob:
        scope, colons, op = text.partition("::")
        if not colons:
            return cls(scope, OpGlob(rule, None, None))
        op, _, index = op.partition("#")
        return cls(scope, OpGlob(rule, op, int(index) if index.isdigit() else None))


class RuleMatcher:
    """Matches the sites of one model against one plan."""

    def __init__(self, plan: Plan) -> None:
        self.rules: Sequence[PlanRule] = plan.rules
        self._literal: dict[str, list[OpGlob]] = defaultdict(list)
        self._wild: list[tuple[re.Pattern[str], OpGlob]] = []
        self._sorted: dict[tuple[OpGlob, ...], tuple[dict[str, list[OpGlob]], list[OpGlob]]] = {}
        patterns: dict[str, re.Pattern[str]] = {}
        for number, rule in enumerate(plan.rules):
            for text in rule.match:
                glob = _Glob.parse(number, text)
                if _WILD.search(glob.scope):
                    if glob.scope not in patterns:
                        patterns[glob.scope] = re.compile(fnmatch.translate(glob.scope))
                    self._wild.append((patterns[glob.scope], glob.op))
                else:
                    self._literal[glob.scope].append(glob.op)

    @property
    def named_ops(self) -> set[str]:
        """Ops that a rule names without wildcards."""
        globs = [g for _, g in self._wild] + [g for found in self._literal.values() for g in found]
        return {g.op for g in globs if g.op is not None and not _WILD.search(g.op)}

    def relevant(self, scope: str) -> tuple[OpGlob, ...]:
        """The rules that could concern a scope (``fqn`` or ``fqn:method``), in the plan's order.

        Module globs are matched against the FQN; op globs against the scope.
        """
        module = scope.partition(":")[0]
        found = [g for g in self._literal.get(scope, ()) if g.op is not None or scope == module]
        if module != scope:
            found += [g for g in self._literal.get(module, ()) if g.op is None]
        verdicts: dict[tuple[str, str], bool] = {}
        for pattern, glob in self._wild:
            name = module if glob.op is None else scope
            key = (pattern.pattern, name)
            if key not in verdicts:
                verdicts[key] = pattern.match(name) is not None
            if verdicts[key]:
                found.append(glob)
        return tuple(sorted(found, key=lambda g: g.rule))

    def rule(self, relevant: tuple[OpGlob, ...], op: str, index: int | None = None) -> PlanRule | None:
        """The first of the relevant rules that takes the ``index``-th call of ``op`` (None: a call no rule names)."""
        by_op, others = self._by_op(relevant)
        for glob in heapq.merge(by_op.get(op, ()), others, key=lambda g: g.rule):
            rule = self.rules[glob.rule]
            if glob.op is None:
                if op in GEMM_OPS or rule.formats.input == "fp32":
                    return rule
            elif (glob.call is None or glob.call == index) and _op_matches(glob.op, op):
                return rule
        return None

    def _by_op(self, relevant: tuple[OpGlob, ...]) -> tuple[dict[str, list[OpGlob]], list[OpGlob]]:
        """The relevant globs that name one op, by it, and the others; hundreds of ops are looked up one by one."""
        if relevant not in self._sorted:
            by_op: dict[str, list[OpGlob]] = defaultdict(list)
            others = []
            for glob in relevant:
                if glob.op is None or _WILD.search(glob.op):
                    others.append(glob)
                else:
                    by_op[glob.op].append(glob)
            self._sorted[relevant] = by_op, others
        return self._sorted[relevant]

    def rule_for_site(self, scope: str, op: str, index: int) -> PlanRule | None:
        return self.rule(self.relevant(scope), op, index)


@functools.lru_cache(maxsize=65536)
def _op_matches(glob: str, op: str) -> bool:
    return glob == op or fnmatch.fnmatchcase(op, glob)
