"""Why the chosen plan has what it has: per group, what each format saves and harms, and what would change the choice.

Two kinds of numbers, which stay apart.  *Predicted* is the planner's: what its problem said before the first trial,
harms brought to units of the loss gap by the trials.  *After the trials* is what the trials as a whole say of one
choice: the linear part of the models that were fitted to all of them, with its standard deviation; a choice that no
trial had has none.  Savings are shares of the fp32 step, without the casts that a choice needs beside its neighbours;
what would change counts them.

The shape of an explanation::

    group, num_sites, flops_share    of the group; of a pin the sites' glob, and null
    chosen           its format
    kind             "measured" | "estimated": of the savings; harms are always measured
    of               "time" | "memory": what is saved
    options          list of {format, is_chosen, num_trials, note,
                     predicted {saving_s, saving, harm} | null, after_trials {saving, saving_sd, harm, harm_sd} | null}
    limit            what keeps it from another format, see autoprec/tune/answers/reasons.py
    sentence         the same in words, with the numbers
    would_change     {format, saving, harm} of the nearest better format, against the chosen mix | null
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from optuna.trial import FrozenTrial

from autoprec.estimate import Estimate
from autoprec.plan import PlanRule
from autoprec.planner.problem import Option, Problem
from autoprec.tune.answers.reasons import Chosen, Reason, Swap, find_reason
from autoprec.tune.answers.row import TrialRow
from autoprec.tune.sampling.encoding import Encoding
from autoprec.tune.sampling.history import History
from autoprec.tune.sampling.objective import Objective
from autoprec.tune.sampling.plan_sampler import PlanSampler
from autoprec.tune.sampling.surrogate import Model
from autoprec.tune.space import Group, Space

#: Standard deviations that a difference must be beyond, and a share of a step that is none.
_CLEAR, _NOTHING = 2.0, 0.001


def explain(
    space: Space,
    problem: Problem | None,
    rows: Sequence[TrialRow],
    trials: Sequence[FrozenTrial],
    sampler: PlanSampler,
    winner: Mapping[str, str] | None,
    objective: Objective,
) -> tuple[dict[str, Any], ...]:
    """One explanation for each pin and each group, as JSON values; see the module.

    Args:
        space: of the trials.
        problem: what the planner was given; None where nothing was priced.
        rows: finished trials.
        trials: Optuna's, of the same study.
        sampler: over ``space``, for the same objective; its models are fitted here.
        winner: group → format of the confirmed mix; None where fp32 stays.
        objective: what was looked for.
    """
    encoding, history, (cost, gap) = sampler.fitted(trials)
    reference = {group.name: group.choices[0] for group in space.groups}
    fitted = _Fitted(
        encoding=encoding,
        history=history,
        models=(cost, gap),
        effects=(cost.effects(), gap.effects()),
        problem=problem,
        rows=rows,
        mix={**reference, **(winner or {})},
        is_confirmed=winner is not None,
        objective=objective,
    )
    return (*(_explain_pin(pin) for pin in space.pins), *(fitted.explain(group) for group in space.groups))


@dataclass(frozen=True, kw_only=True)
class _Fitted:
    """What the trials say together; of pairs, the cost's comes first, then the gap's.

    Args:
        effects: of each choice, mean ``(K,)`` and covariance ``(K, K)``.
        mix: that was chosen.
    """

    encoding: Encoding
    history: History
    models: tuple[Model, Model]
    effects: tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    problem: Problem | None
    rows: Sequence[TrialRow]
    mix: Mapping[str, str]
    is_confirmed: bool
    objective: Objective

    @property
    def of(self) -> Literal["time", "memory"]:
        return "memory" if self.objective.kind == "memory" else "time"

    @property
    def kind(self) -> Literal["measured", "estimated"]:
        figures = [row.memory_bytes if self.of == "memory" else row.speedup for row in self.rows]
        return "estimated" if any(isinstance(figure, Estimate) for figure in figures) else "measured"

    def explain(self, group: Group) -> dict[str, Any]:
        chosen = self.mix[group.name]
        reason = self._reason(group)
        left_out = [] if self.problem is None else [o for o in self._priced(group) if o.format not in group.choices]
        return {
            "group": group.name,
            "num_sites": group.num_sites,
            "flops_share": group.flops_share,
            "chosen": chosen,
            "kind": self.kind,
            "of": self.of,
            "options": [
                *(self._option(group, k) for k in range(len(group.choices))),
                *(self._left_out(group, option) for option in left_out),
            ],
            **_reason_json(reason),
        }

    def _option(self, group: Group, k: int) -> dict[str, Any]:
        name, first = group.choices[k], self._column(group, 0)
        column = first + k
        count = int((self.history.mixes[:, self._place(group)] == k).sum())
        after = None
        if count and k:
            saving, saving_sd = self._contrast(0, first, column)
            harm, harm_sd = self._contrast(1, first, column)
            after = {"saving": -saving, "saving_sd": saving_sd, "harm": harm, "harm_sd": harm_sd}
        predicted = None
        if self.problem is not None and k:
            harms = self.models[1].mean
            harm = float(harms[column] - harms[first])
            predicted = {**self._saving(group, self._priced_as(group, name)), "harm": harm}
        return {
            "format": name,
            "is_chosen": name == self.mix[group.name],
            "num_trials": count,
            "predicted": predicted,
            "after_trials": after,
            "note": "" if k else "the reference",
        }

    def _left_out(self, group: Group, option: Option) -> dict[str, Any]:
        note = "left out: another format costs and harms no more"
        predicted = {**self._saving(group, option), "harm": None}
        is_chosen = option.format == self.mix[group.name]
        return {
            "format": option.format,
            "is_chosen": is_chosen,
            "num_trials": 0,
            "predicted": predicted,
            "after_trials": None,
            "note": note,
        }

    def _reason(self, group: Group) -> Reason:
        others = [name for name in group.choices if name != self.mix[group.name]]
        mixes = [self.mix, *({**self.mix, group.name: name} for name in others)]
        numbers = np.array([self.encoding.indices(mix) for mix in mixes], dtype=int)
        cost, gap = (model.predict(numbers)[0] for model in self.models)
        chosen = Chosen(
            is_confirmed=self.is_confirmed, cost=float(cost[0]), gap=float(gap[0]), kind=self.kind, of=self.of
        )
        here = self._column(group, group.choices.index(self.mix[group.name]))
        swaps = []
        for name, mix, its_cost, its_gap in zip(others, mixes[1:], cost[1:], gap[1:], strict=True):
            there = self._column(group, group.choices.index(name))
            swaps.append(
                Swap(
                    format=name,
                    saving=float(cost[0] - its_cost),
                    saving_noise=_CLEAR * self._contrast(0, here, there)[1] + _NOTHING,
                    harm=float(its_gap - gap[0]),
                    harm_noise=_CLEAR * self._contrast(1, here, there)[1],
                    row=next((row for row in self.rows if row.formats == mix), None),
                )
            )
        return find_reason(self.mix[group.name], swaps, chosen, self.objective)

    def _contrast(self, which: int, a: int, b: int) -> tuple[float, float]:
        """What choice ``b`` adds more than ``a``, and its standard deviation; of the cost (0) or the gap (1)."""
        mean, covariance = self.effects[which]
        variance = covariance[a, a] + covariance[b, b] - 2 * covariance[a, b]
        return float(mean[b] - mean[a]), float(np.sqrt(max(variance, 0.0)))

    def _place(self, group: Group) -> int:
        return list(self.encoding.choices).index(group.name)

    def _column(self, group: Group, k: int) -> int:
        return sum(self.encoding.sizes[: self._place(group)]) + k

    def _priced(self, group: Group) -> tuple[Option, ...]:
        assert self.problem is not None
        return next(priced.options for priced in self.problem.groups if priced.name == group.name)

    def _priced_as(self, group: Group, name: str) -> Option:
        return next(option for option in self._priced(group) if option.format == name)

    def _saving(self, group: Group, option: Option) -> dict[str, float | None]:
        """What the planner was told of it; it was told of time, not of bytes."""
        assert self.problem is not None
        if self.of == "memory":
            return {"saving_s": None, "saving": None}
        whole = self.problem.cost_s({priced.name: priced.options[0].format for priced in self.problem.groups})
        seconds = self._priced(group)[0].cost_s - option.cost_s
        return {"saving_s": seconds, "saving": seconds / whole}


def _explain_pin(pin: PlanRule) -> dict[str, Any]:
    chosen = pin.formats.input
    return {
        "group": ", ".join(pin.match),
        "num_sites": None,
        "flops_share": None,
        "chosen": chosen,
        "kind": "measured",
        "of": "time",
        "options": [],
        **_reason_json(Reason(limit="pinned", sentence=f"Pinned by the user: {pin.reason or chosen}.")),
    }


def _reason_json(reason: Reason) -> dict[str, Any]:
    swap = reason.swap
    nearest = None if swap is None else {"format": swap.format, "saving": swap.saving, "harm": swap.harm}
    return {"limit": reason.limit, "sentence": reason.sentence, "would_change": nearest}
