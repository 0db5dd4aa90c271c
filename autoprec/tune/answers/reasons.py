"""Why a group has the format it has, and what would change that, in one sentence with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autoprec.tune.answers.row import TrialRow
from autoprec.tune.sampling.objective import Objective
from autoprec.tune.space import RULES

#: What keeps a group from another format: the user; that no other is allowed; that none is better by more than the
#: noise; the loss budget; the speed that was asked for; that a mix wasn't measured; that no mix was confirmed.
Limit = Literal["pinned", "only choice", "none better", "budget", "speed", "not measured", "not confirmed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Another format in one group of the chosen mix.

    Args:
        format: instead of the chosen one.
        saving: share of the fp32 step's time (or bytes) that it saves more; its noise is two standard deviations.
        harm: loss gap that it adds, with the same.
        row: the trial that measured exactly this mix, if one did.
    """

    format: str
    saving: float
    saving_noise: float
    harm: float
    harm_noise: float
    row: TrialRow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why it stays as it is; ``swap`` is the nearest of what would be better."""

    limit: Limit
    sentence: str
    swap: Swap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What is known of the whole chosen mix.

    Args:
        is_confirmed: False where fp32 stays for want of a confirmed mix.
        cost: of a step, in units of fp32's.
        gap: loss gap that is believed.
        kind: whether savings rest on timings, or on an estimate.
        of: what is saved.
    """

    is_confirmed: bool
    cost: float
    gap: float
    kind: Literal["measured", "estimated"]
    of: Literal["time", "memory"]


def find_reason(format_name: str, swaps: Sequence[Swap], chosen: Chosen, objective: Objective) -> Reason:
    """The reason of one group.

    Args:
        format_name: what it has.
        swaps: every other format that it may have.
        chosen: the mix.
        objective: what was looked for.
    """
    if not swaps:
        return Reason(limit="only choice", sentence=f"Nothing but {format_name} was possible here.")
    if objective.min_speedup is not None:
        return _for_loss(swaps, chosen, objective.min_speedup)
    return _for_saving(format_name, swaps, chosen, objective.budget)


def percent(share: float) -> str:
    """A share with two or three digits, such as 12%, 1.2% or 0.031%."""
    size = abs(100 * share)
    digits = 0 if size >= 10 else 1 if size >= 1 else 2 if size >= 0.1 else 3
    return f"{100 * share:.{digits}f}%"


def _for_saving(format_name: str, swaps: Sequence[Swap], chosen: Chosen, budget: float) -> Reason:
    better = [swap for swap in swaps if swap.saving > swap.saving_noise]
    thing = "smaller" if chosen.of == "memory" else "faster"
    if not better:
        back = next((swap for swap in swaps if swap.format == "fp32" and swap.saving < -swap.saving_noise), None)
        sentence = f"No other format is {thing} here by more than the noise."
        if back is not None:
            harm = f"win back {percent(-back.harm)} of loss" if back.harm < -back.harm_noise else "win back no loss"
            sentence += f" fp32 would give up {percent(-back.saving)} of {_whole(chosen)} and {harm}."
        return Reason(limit="none better", sentence=sentence)
    swap = min(better, key=lambda swap: (max(swap.harm, 0.0), -swap.saving))
    left = max(0.0, budget - chosen.gap)
    says = f"{_there(swap)} {_would_save(swap, chosen)}"
    if swap.row is not None:
        return _measured(swap, says, chosen, budget)
    cost = f"is expected to cost {percent(swap.harm)} of loss" if swap.harm > 0 else "isn't expected to cost loss"
    if swap.harm > left:
        sentence = f"{says} and {cost}, over the {percent(left)} that is left of the budget."
        return Reason(limit="budget", sentence=sentence, swap=swap)
    if not chosen.is_confirmed:
        sentence = f"{says} and {cost}, but no mix was confirmed, so {format_name} stays."
        return Reason(limit="not confirmed", sentence=sentence, swap=swap)
    return Reason(limit="not measured", sentence=f"{says} and {cost}: no trial measured that mix.", swap=swap)


def _measured(swap: Swap, says: str, chosen: Chosen, budget: float) -> Reason:
    """A trial tells more than a belief."""
    row = swap.row
    assert row is not None
    found = f"{says}; trial {row.number} measured that mix: "
    if row.state != "complete":
        limit: Limit = "budget" if row.state in ("stopped", "diverged") else "not confirmed"
        return Reason(limit=limit, sentence=f"{found}{row.note or row.state}.", swap=swap)
    if row.loss_gap > budget:
        over = f"its loss gap is {percent(row.loss_gap)}, where {percent(budget)} is allowed."
        return Reason(limit="budget", sentence=found + over, swap=swap)
    gap = f"a loss gap of {percent(row.loss_gap)}"
    if not chosen.is_confirmed:
        end = f"{gap}, but no mix was confirmed."
        return Reason(limit="not confirmed", sentence=found + end, swap=swap)
    end = f"{gap}, and it wasn't better by more than the noise, or didn't hold on fresh data."
    return Reason(limit="not confirmed", sentence=found + end, swap=swap)


def _for_loss(swaps: Sequence[Swap], chosen: Chosen, min_speedup: float) -> Reason:
    better = [swap for swap in swaps if swap.harm < -swap.harm_noise]
    if not better:
        return Reason(limit="none better", sentence="No other format has less loss here by more than the noise.")
    swap = max(better, key=lambda swap: swap.saving)
    speed = 1 / max(chosen.cost - swap.saving, 1e-6)
    says = (
        f"{_there(swap)} is expected to win back {percent(-swap.harm)} of loss, at {speed:.2f} times fp32's speed"
        f"{' (estimated)' if chosen.kind == 'estimated' else ''}"
    )
    if speed < min_speedup:
        return Reason(limit="speed", sentence=f"{says}, below the {min_speedup:g} asked for.", swap=swap)
    if not chosen.is_confirmed:
        return Reason(limit="not confirmed", sentence=f"{says}, but no mix was confirmed.", swap=swap)
    if swap.row is not None:
        gap = percent(swap.row.loss_gap)
        sentence = f"{says}; trial {swap.row.number} measured that mix at a loss gap of {gap}."
        return Reason(limit="not confirmed", sentence=sentence, swap=swap)
    return Reason(limit="not measured", sentence=f"{says}: no trial measured that mix.", swap=swap)


def _would_save(swap: Swap, chosen: Chosen) -> str:
    verb = "is estimated to save" if chosen.kind == "estimated" else "would save"
    another = "another " if chosen.is_confirmed else ""
    return f"{verb} {another}{percent(swap.saving)} of {_whole(chosen)}"


def _there(swap: Swap) -> str:
    return "Following the rules here" if swap.format == RULES else f"{swap.format} here"


def _whole(chosen: Chosen) -> str:
    return "the memory" if chosen.of == "memory" else "the fp32 step"
