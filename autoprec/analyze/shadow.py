"""The values a model would have in a 16-bit format, computed beside the fp32 run.

Each tensor that a low-precision site made has a shadow: its value with every rounding since the last matrix product,
and its value with that product's rounding alone.  Comparing the two tells whether keeping the elementwise ops between
in fp32 would help.  Matrix products and fp32 ops start afresh from the real values: an error is charged where it
is made, not to every site after it.  All shadows are stored in fp32: no op needs a 16-bit kernel for this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from autoprec.analyze.errors import relative_error, round_low
from autoprec.analyze.facts import SiteFacts
from autoprec.analyze.ops import LIKE_FACTORIES, RANDOM_FACTORIES, SELECTIONS, SHAPES
from autoprec.graph.dataflow import Step, TensorMap, replace_tensors, tensors
from autoprec.rulebook import Rulebook

#: Arguments an op writes beside its result, by position: a repeated call must write a copy.
_WRITTEN = {"batch_norm": (1, 2), "instance_norm": (1, 2)}


@dataclass(slots=True)
class Shadow:
    """One tensor's value in the format.

    Args:
        low: with every rounding since the last matrix product.
        wide: with that product's rounding alone.
        is_low: the converted model holds it in 16 bit.
        chain: follow sites that rounded it since.
        roots: matrix products it comes from.
    """

    low: torch.Tensor
    wide: torch.Tensor
    is_low: bool
    chain: frozenset[str]
    roots: frozenset[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call gave under the format.

    Args:
        low: error of the result with all roundings.
        unrounded: error with all roundings but the result's own.
        wide: error with the matrix products' roundings alone; NaN where it wasn't computed.
        chain, roots: see :class:`Shadow`; what the result is made of.
    """

    low: float
    unrounded: float
    wide: float
    chain: frozenset[str]
    roots: frozenset[str]


#: Ops whose fp32 parameters leave the result in the dtype of the input.
_LIKE_INPUT = frozenset({"batch_norm"})

#: Below this error nothing needs a reason.
_NOTABLE = 1e-3

#: Decides, from the outcome, whether the site's result stays in fp32 from here on.
Judge = Callable[[SiteFacts, Outcome], bool]


class _CannotRepeatError(Exception):
    """The shadows' values fail one of the op's own checks; its result then counts as exact."""


class ShadowRun:
    """Runs one format beside the model.

    Args:
        dtype: of the format.
        name: of the format.
        rulebook: gives each op's kind.
        judge: sees each site's outcome; True starts afresh from the real value.
    """

    def __init__(self, name: str, dtype: torch.dtype, rulebook: Rulebook, judge: Judge) -> None:
        self.name, self.dtype = name, dtype
        self._rulebook, self._judge = rulebook, judge
        self._shadows: TensorMap[Shadow] = TensorMap()

    def follow(self, step: Step, facts: SiteFacts | None, is_kept: bool, is_upcast: bool) -> None:
        """Takes one call along.

        Args:
            step: the call.
            facts: of its site, None if it is none.
            is_kept: the site is known to stay fp32.
            is_upcast: the call is the author's cast to fp32.
        """
        if not (step.writes or step.outputs) or any(t.device.type == "meta" for t in step.outputs):
            return
        kind = self._rulebook.rule_for(step.op).kind
        if facts is not None and any(s is not None and s.is_low for s in map(self._shadows.get, step.inputs)):
            facts.reads_low.add(self.name)
        try:
            if step.op in LIKE_FACTORIES | RANDOM_FACTORIES:
                self._like(step)
            elif is_upcast:
                self._upcast(step)
            elif kind == "low" and facts is not None:
                self._product(step, facts, is_kept)
            elif kind == "fp32" and facts is not None:
                self._wide_op(step, facts)
            else:
                self._following(step, facts, is_kept, to_destination=kind == "fixed")
        except _CannotRepeatError:
            self._forget(step)

    # ------------------------------------------------------------------------------------------------- kinds of calls

    def _like(self, step: Step) -> None:
        """A new tensor of another's dtype: its values are what they are (uninitialised, drawn, or constant)."""
        source = self._shadows.get(step.args[0]) if step.inputs else None
        if source is not None and source.is_low and isinstance(step.out, torch.Tensor) and not step.kwargs.get("dtype"):
            wide = step.out.clone()
            self._shadows[step.out] = Shadow(round_low(wide, self.dtype), wide, True, frozenset(), frozenset())

    def _upcast(self, step: Step) -> None:
        source = self._shadows.get(step.args[0])
        if source is not None and isinstance(step.out, torch.Tensor):
            if source.low.dtype != step.out.dtype:
                source = Shadow(source.low.to(step.out), source.wide.to(step.out), False, source.chain, source.roots)
            self._shadows[step.out] = Shadow(source.low, source.wide, False, source.chain, source.roots)

    def _product(self, step: Step, facts: SiteFacts, is_kept: bool) -> None:
        if any(t.dtype != torch.float32 for t in step.inputs if t.is_floating_point() or t.is_complex()):
            return self._forget(step)
        me = frozenset({facts.site.id})
        lows = self._repeat(step, self._rounded)
        pairs = self._pairs(step, lows)
        if not pairs:
            return self._forget(step)
        pairs = [(real, round_low(low, self.dtype)) for real, low in pairs]
        error = _worst(pairs)
        facts.errors[self.name] = max(facts.errors.get(self.name, 0.0), error)
        above = [s for s in map(self._shadows.get, step.inputs) if s is not None]
        if self._judge(facts, _outcome(error, math.nan, math.nan, above)) or is_kept:
            return self._forget(step)
        for real, low in pairs:
            self._shadows[real] = Shadow(low, low, True, frozenset(), me)

    def _wide_op(self, step: Step, facts: SiteFacts) -> None:
        above = [s for s in map(self._shadows.get, step.inputs) if s is not None]
        lows = self._pairs(step, self._repeat(step, self._low if above else self._rounded))
        rounded = [relative_error(round_low(low, self.dtype), real) for real, low in lows]
        facts.errors[self.name] = max(facts.errors.get(self.name, 0.0), *rounded, 0.0)
        if above and lows:
            error = _worst(lows)
            wides = self._pairs(step, self._repeat(step, self._wide)) if error > _NOTABLE and _differ(above) else lows
            self._judge(facts, _outcome(error, error, _worst(wides), above))
        self._forget(step)

    def _following(self, step: Step, facts: SiteFacts | None, is_kept: bool, to_destination: bool) -> None:
        above = [s for s in map(self._shadows.get, step.inputs) if s is not None]
        if not above or step.kwargs.get("out") is not None:
            return self._forget(step)
        is_low = self._result_is_low(step, to_destination)
        if facts is not None and is_low:
            facts.lows.add(self.name)
        is_low = is_low and not is_kept
        rounds = is_low and step.op not in SHAPES
        if step.writes:
            self._part(step.args[0])
        result = self._repeat(step, self._low)
        lows = wides = self._pairs(step, result)
        if rounds or _differ(above):
            wides = self._pairs(step, self._repeat(step, self._wide))
        if len(wides) != len(lows):  # a shape that depends on values: nothing to compare
            return self._forget(step)
        unrounded = _worst(lows)
        if rounds:
            lows = [(real, self._round_result(step, low)) for real, low in lows]
        if facts is not None and lows and step.op not in SHAPES:
            low = _worst(lows) if rounds else unrounded
            outcome = _outcome(low, unrounded, _worst(wides), above)
            if is_low:
                facts.errors[self.name] = max(facts.errors.get(self.name, 0.0), outcome.low)
            if self._judge(facts, outcome):
                return self._forget(step)
        me = frozenset({facts.site.id}) if rounds and facts is not None else frozenset()
        chain, roots = me | _union(s.chain for s in above), _union(s.roots for s in above)
        for (real, low), (_, wide) in zip(lows, wides, strict=True):
            self._shadows[real] = Shadow(low, wide, is_low, chain, roots)
        self._follow_discrete(step, result, chain, roots)

    # -------------------------------------------------------------------------------------------------------- helpers

    def _follow_discrete(self, step: Step, result: Any, chain: frozenset[str], roots: frozenset[str]) -> None:
        """Comparisons of rounded values may come out otherwise; what they steer is then off by whole values.

        Selections among many are judged by what they are, not by whether these examples happen to differ.
        """
        if step.op in SELECTIONS:
            return
        for real, low in self._pairs(step, result, floating=False):
            if not torch.equal(real, low):
                self._shadows[real] = Shadow(low, low, False, chain, roots)

    def _part(self, tensor: torch.Tensor) -> None:
        """Two values of a tensor that is about to be written twice must not be one."""
        shadow = self._shadows.get(tensor)
        if shadow is not None and shadow.wide is shadow.low:
            shadow.wide = shadow.low.clone()

    def _round_result(self, step: Step, low: torch.Tensor) -> torch.Tensor:
        rounded = round_low(low, self.dtype)
        return low.copy_(rounded) if step.writes else rounded

    def _result_is_low(self, step: Step, to_destination: bool) -> bool:
        floats = [t for t in step.inputs if t.is_floating_point()]
        if step.writes or to_destination or step.op in _LIKE_INPUT:
            floats = [step.args[0]] if isinstance(step.args[0], torch.Tensor) else floats
        # A tensor without dimensions doesn't widen one with.
        ranked = [t for t in floats if t.dim() > 0] or floats
        shadows = [self._shadows.get(t) for t in ranked]
        return bool(shadows) and all(s is not None and s.is_low for s in shadows)

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return round_low(tensor, self.dtype) if tensor.is_floating_point() else tensor

    def _low(self, tensor: torch.Tensor) -> torch.Tensor:
        shadow = self._shadows.get(tensor)
        return tensor if shadow is None else shadow.low

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        shadow = self._shadows.get(tensor)
        return tensor if shadow is None else shadow.wide

    def _repeat(self, step: Step, value: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """The call on other values of its tensors; what it writes is a copy."""

        def substitute(v: torch.Tensor) -> torch.Tensor:
            if v.is_complex() or v.dtype == torch.float64:
                return v
            return value(v) if v.is_floating_point() or self._shadows.get(v) is not None else v

        args = list(replace_tensors(step.args, substitute))
        kwargs = replace_tensors(step.kwargs, substitute)
        if step.writes:
            mine = self._shadows.get(step.args[0])
            args[0] = step.before.clone() if mine is None else value(step.args[0])  # type: ignore[union-attr]
        for position in _WRITTEN.get(step.op, ()):
            if position < len(args) and isinstance(args[position], torch.Tensor):
                args[position] = args[position].clone()
        for name in ("running_mean", "running_var"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].clone()
        try:
            return step.again(tuple(args), kwargs) if step.name != "__setitem__" else _set_item(args)
        except Exception as error:
            raise _CannotRepeatError from error

    def _pairs(self, step: Step, result: Any, floating: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(real, repeated) of the results that can be compared."""
        real = [step.args[0]] if step.name == "__setitem__" else step.outputs
        pairs = []
        for r, low in zip(real, tensors(result), strict=False):
            if r.shape == low.shape and r.layout == low.layout == torch.strided:
                is_float = r.dtype == torch.float32 and low.dtype == torch.float32
                if is_float if floating else not (r.is_floating_point() or r.is_complex()):
                    pairs.append((r, low))
        return pairs

    def _forget(self, step: Step) -> None:
        outputs = [step.args[0]] if step.writes else step.outputs
        for tensor in outputs:
            if step.writes or not any(tensor is t for t in step.inputs):
                self._shadows.pop(tensor)


def _set_item(args: list[Any]) -> torch.Tensor:
    args[0][args[1]] = args[2]
    return args[0]


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*sets)


def _differ(above: list[Shadow]) -> bool:
    return any(s.low is not s.wide for s in above)


def _worst(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return max((relative_error(low, real) for real, low in pairs), default=0.0)


def _outcome(low: float, unrounded: float, wide: float, above: list[Shadow]) -> Outcome:
    return Outcome(low, unrounded, wide, _union(s.chain for s in above), _union(s.roots for s in above))
