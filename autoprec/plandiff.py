"""What changes from one plan to another: rules glob by glob, then the settings."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from typing import Any

from autoprec.plan import Plan, PlanRule


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleChange:
    """One glob's rule in both plans; None where a plan has no rule for the glob."""

    glob: str
    before: PlanRule | None
    after: PlanRule | None

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return f"{'+' if self.after else '-'} {self.glob}: {_choice(self.after or self.before)}"
        return f"~ {self.glob}: {_choice(self.before)} -> {_choice(self.after)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """One setting, ``scaler.init_scale`` say, in both plans; None where a plan lacks it."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"~ {self.name}: {_value(self.before)} -> {_value(self.after)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """All that changes; false when nothing does.

    Args:
        rules: globs whose formats or backends change, come or go.
        moved: globs of both plans that stand in another order; the first match wins, so that this can matter.
        settings: everything that isn't a rule.
    """

    rules: tuple[RuleChange, ...] = ()
    moved: tuple[str, ...] = ()
    settings: tuple[SettingChange, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rules or self.moved or self.settings)

    def __str__(self) -> str:
        moved = (f"~ {glob}: moved among the rules" for glob in self.moved)
        return "\n".join([*map(str, self.rules), *moved, *map(str, self.settings)]) or "no difference"


def diff(before: Plan, after: Plan, *, evidence: bool = False) -> PlanDiff:
    """What changes from one plan to the other.

    Args:
        before: the plan to start from.
        after: the plan to end with.
        evidence: also compare what doesn't change a conversion: the evidence, and each rule's reason and source.
    """
    old, new = _by_glob(before), _by_glob(after)
    rules = tuple(
        RuleChange(glob=glob, before=old.get(glob), after=new.get(glob))
        for glob in {**old, **new}
        if _decision(old.get(glob), evidence) != _decision(new.get(glob), evidence)
    )
    left, right = _settings(before, evidence), _settings(after, evidence)
    settings = tuple(
        SettingChange(name=name, before=left.get(name), after=right.get(name))
        for name in {**left, **right}
        if left.get(name) != right.get(name)
    )
    return PlanDiff(rules=rules, moved=_moved(list(old), list(new)), settings=settings)


def _by_glob(plan: Plan) -> dict[str, PlanRule]:
    found: dict[str, PlanRule] = {}
    for rule in plan.rules:
        for glob in rule.match:
            found.setdefault(glob, rule)  # a later rule for the same glob is never reached
    return found


def _decision(rule: PlanRule | None, evidence: bool) -> tuple[Any, ...] | None:
    if rule is None:
        return None
    return (rule.formats, rule.backend, *((rule.reason, rule.source) if evidence else ()))


def _moved(old: list[str], new: list[str]) -> tuple[str, ...]:
    common = set(old) & set(new)
    old, new = [g for g in old if g in common], [g for g in new if g in common]
    kept = {
        glob
        for block in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        for glob in new[block.b : block.b + block.size]
    }
    return tuple(glob for glob in new if glob not in kept)


def _settings(plan: Plan, evidence: bool) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(plan, name) for name in ("target", "mode", "level", "merge_casts")}
    found |= {f"scaler.{f.name}": getattr(plan.scaler, f.name) for f in fields(plan.scaler)}
    found |= _leaves("recipe", plan.recipe)
    # the hash stands for the model's whole structure
    found["fingerprint"] = plan.fingerprint.get("hash", plan.fingerprint or None)
    return found | (_leaves("evidence", plan.evidence) if evidence else {})


def _leaves(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {path: leaf for key, item in value.items() for path, leaf in _leaves(f"{name}.{key}", item).items()}
    return {name: value} if value != {} else {}


def _choice(rule: PlanRule | None) -> str:
    if rule is None:
        return "none"
    backend = f" on {', '.join(rule.backend)}" if rule.backend else ""
    return f"{rule.formats}{backend}" + (f" ({rule.reason})" if rule.reason else "")


def _value(value: Any) -> str:
    return "none" if value is None else json.dumps(value, sort_keys=True, default=repr)
