"""Models of a mix's cost and of its loss gap: sums over groups plus a smooth remainder.

A Gaussian process with covariance ``F F' + s s' ρ^(groups that differ)``.  The features ``F`` say what each choice
adds, ``s`` how much what choices do together may matter.

Dimensions: n measured mixes, m asked ones, K choices of all groups, D features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import nnls

from autoprec.tune.sampling.encoding import Encoding

_RHO = 0.6
#: Loss gap: share of the budget that a choice's harm may be off by, beside its own size; weight of one common scale.
_SPREAD, _RIDGE, _LEAST_SCALE = 0.4, 0.3, 0.05
#: Share of a mix's loss gap that isn't a sum over groups.
_REMAINDER = 0.15
#: Mixes needed before formats get scales of their own.
_ENOUGH = 5
#: Relative errors of a cost: of each choice's, of all together, and of what doesn't add up.
_COST_ERROR = {"measured": (0.05, 0.1, 0.01), "estimated": (0.1, 0.3, 0.02)}
#: A cost is never known better than this.
_COST_NOISE = 0.002


@dataclass(frozen=True, slots=True)
class Inputs:
    """Mixes as the process sees them.

    Args:
        mean: before any measurement, ``(n,)``.
        features, remainder: ``(n, D)`` and ``(n,)``, see the module.
        onehot: their choices, ``(n, K)``.
    """

    mean: np.ndarray
    features: np.ndarray
    remainder: np.ndarray
    onehot: np.ndarray

    def covariance(self, other: Inputs, groups: int) -> np.ndarray:
        differing = groups - self.onehot @ other.onehot.T
        return self.features @ other.features.T + np.outer(self.remainder, other.remainder) * _RHO**differing


class Process:
    """The process after what was measured.

    Args:
        known: measured mixes.
        y: what was measured, ``(n,)``.
        noise: its standard deviation, ``(n,)``, above 0.
        groups: how many a mix has.
    """

    def __init__(self, known: Inputs, y: np.ndarray, noise: np.ndarray, groups: int) -> None:
        self._known, self._groups, self._noise = known, groups, noise
        self._y = y
        if len(y):
            covariance = known.covariance(known, groups)
            self._factor = cho_factor(covariance + np.diag(noise**2 + 1e-12 * np.diag(covariance).max()), lower=True)
            self._weights = cho_solve(self._factor, y - known.mean)

    def predict(self, asked: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each mix, ``(m,)``."""
        own = (asked.features**2).sum(axis=1) + asked.remainder**2
        if not len(self._y):
            return asked.mean, np.sqrt(np.maximum(own, 1e-20))
        cross = asked.covariance(self._known, self._groups)
        var = own - (cross.T * cho_solve(self._factor, cross.T)).sum(axis=0)
        return asked.mean + cross @ self._weights, np.sqrt(np.maximum(var, 1e-8 * own + 1e-20))

    def surprise(self) -> float:
        """Mean square of what was measured in units of what was expected: 1 for a prior that is right."""
        if not len(self._y):
            return 1.0
        return float((self._y - self._known.mean) @ self._weights) / len(self._y)

    def believing(self, asked: Inputs) -> Process:
        """As if the mixes that others are measuring had come out as expected."""
        if not len(asked.mean):
            return self
        mean, _ = self.predict(asked)
        both = Inputs(
            *(
                np.concatenate([getattr(self._known, name), getattr(asked, name)])
                for name in ("mean", "features", "remainder", "onehot")
            )
        )
        noise = np.full(len(mean), float(np.median(self._noise)) if len(self._noise) else 1e-3)
        return Process(both, np.concatenate([self._y, mean]), np.concatenate([self._noise, noise]), self._groups)

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the features, after what was measured: mean ``(D,)`` and covariance ``(D, D)``."""
        features = self._known.features
        before = np.eye(features.shape[1])
        if not len(self._y):
            return np.zeros(len(before)), before
        return features.T @ self._weights, before - features.T @ cho_solve(self._factor, features)

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Weights of the features, ``(count, D)``: the mean's first, then draws from what is believed."""
        size = self._known.features.shape[1]
        drawn = np.concatenate([np.zeros((1, size)), rng.standard_normal((count - 1, size))])
        if not len(self._y):
            return drawn
        rest = self._known.covariance(self._known, self._groups) - self._known.features @ self._known.features.T
        root = np.linalg.cholesky(rest + np.diag(self._noise**2 + 1e-9 * np.diag(rest).max()))
        error = rng.standard_normal((count, len(self._y))) @ root.T
        error[0] = 0.0
        missing = (self._y - self._known.mean) - drawn @ self._known.features.T - error
        return drawn + cho_solve(self._factor, missing.T).T @ self._known.features


@dataclass(frozen=True, slots=True)
class Model:
    """A process over mixes, and each choice's own part of it.

    Args:
        encoding: of the mixes.
        process: after the measurements.
        mean: of each choice before them, ``(K,)``.
        sd: of each choice before them, ``(K,)``.
        base: whether a mix has a cost beside its choices'.
        scale: standard deviation of a common relative error.
        least, most, share: remainder as a share of the mean, between two bounds.
    """

    encoding: Encoding
    process: Process
    mean: np.ndarray
    sd: np.ndarray
    base: bool
    scale: float
    least: float
    most: float
    share: float

    def inputs(self, mixes: np.ndarray) -> Inputs:
        onehot = self.encoding.onehot(mixes)
        mean = onehot @ self.mean
        if self.base:
            mean = mean + self.encoding.base_cost(mixes)
        features = onehot * self.sd
        if self.scale:
            features = np.concatenate([features, self.scale * mean[:, None]], axis=1)
        return Inputs(mean, features, self.share * np.clip(mean, self.least, self.most), onehot)

    def predict(self, mixes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.process.predict(self.inputs(mixes))

    def measured(self, mixes: np.ndarray, y: np.ndarray, noise: np.ndarray) -> Model:
        return replace(self, process=Process(self.inputs(mixes), y, noise, len(self.encoding.sizes)))

    def believing(self, mixes: np.ndarray) -> Model:
        return replace(self, process=self.process.believing(self.inputs(mixes)))

    def effects(self) -> tuple[np.ndarray, np.ndarray]:
        """What each choice adds to the sum, after what was measured: mean ``(K,)`` and covariance ``(K, K)``."""
        each = np.diag(self.sd)
        if self.scale:
            each = np.concatenate([each, self.scale * self.mean[:, None]], axis=1)
        mean, covariance = self.process.weights()
        return self.mean + each @ mean, each @ covariance @ each.T

    def tables(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """What each choice adds, ``(count, G, F)``: as expected, then as drawn."""
        drawn = self.process.draw(count, rng)[:, : len(self.mean)]
        return self.encoding.table(self.mean + drawn * self.sd)


def cost_model(encoding: Encoding, mixes: np.ndarray, cost: np.ndarray, cost_sd: np.ndarray) -> Model:
    """Model of the cost in units of the reference's.

    Args:
        encoding: with the costs that are expected.
        mixes: measured, ``(n, G)``.
        cost, cost_sd: of them, ``(n,)``.
    """
    noise = np.maximum(cost_sd, _COST_NOISE * cost)
    each, common, rest = _COST_ERROR[encoding.problem.kind]
    # costs that turn out worse than they claim to be are trusted less
    model = _cost_model(encoding, each, common, rest).measured(mixes, cost, noise)
    surprise = np.sqrt(model.process.surprise())
    if len(cost) >= _ENOUGH and surprise > 1:
        wider = min(surprise, 10.0)
        model = _cost_model(encoding, each * wider, common * wider, rest * wider).measured(mixes, cost, noise)
    return model


def _cost_model(encoding: Encoding, each: float, common: float, rest: float) -> Model:
    sd = each * np.abs(encoding.cost) + 1e-6
    process = Process(_nothing(len(sd) + 1), np.empty(0), np.empty(0), len(encoding.sizes))
    return Model(encoding, process, encoding.cost, sd, True, common, 0.0, np.inf, rest)


def gap_model(encoding: Encoding, mixes: np.ndarray, gap: np.ndarray, noise: np.ndarray, budget: float) -> Model:
    """Model of the loss gap.

    Args:
        encoding: with harms, of which only the proportions count.
        mixes: measured, ``(n, G)``.
        gap, noise: of them, ``(n,)``.
        budget: largest allowed gap.
    """
    onehot = encoding.onehot(mixes)
    mean = encoding.harm * _scales(encoding, onehot, gap, budget)
    groups = max(1, len(encoding.sizes))
    typical = max(budget, float(np.median(np.abs(gap))) if len(gap) else 0.0)
    sd = np.where(encoding.harm == 0, 1e-3 * budget, mean + _SPREAD * typical / np.sqrt(groups))
    process = Process(_nothing(len(sd)), np.empty(0), np.empty(0), groups)
    model = Model(encoding, process, mean, sd, False, 0.0, 0.2 * budget, 4 * budget, _REMAINDER)
    spoilt = np.sqrt(noise**2 + (0.02 * budget) ** 2 + (0.05 * np.minimum(np.abs(gap), 5 * budget)) ** 2)
    fitted = model.measured(mixes, gap, spoilt)
    surprise = np.sqrt(fitted.process.surprise())
    if len(gap) >= _ENOUGH and surprise > 1:  # harms that don't add up
        fitted = replace(model, share=_REMAINDER * min(surprise, 5.0)).measured(mixes, gap, spoilt)
    return fitted


def _scales(encoding: Encoding, onehot: np.ndarray, gap: np.ndarray, budget: float) -> np.ndarray:
    """Loss gap for a unit of harm, for each choice ``(K,)``: one for each format, near one for all."""
    # nothing measured, or gaps at the level of noise: let the worst choices together cost a tenth of the budget
    floor = 0.1 * budget / max(encoding.arrays.harm.max(axis=1).sum(), 1e-30)
    predicted = onehot @ encoding.harm
    if not predicted.any():
        return np.full(len(encoding.harm), floor)
    weight = 1 / (np.abs(gap) + budget / 2)
    common = (weight**2 * predicted * gap).sum() / (weight**2 * predicted**2).sum()
    common = max(common, 0.1 * floor)
    if len(gap) < _ENOUGH:
        return np.full(len(encoding.harm), common)
    by_kind = np.eye(encoding.kinds.max() + 1)[encoding.kinds]
    rows = weight[:, None] * common * (onehot * encoding.harm) @ by_kind
    ridge = np.sqrt(_RIDGE) * np.eye(rows.shape[1])
    ratio, _ = nnls(np.concatenate([rows, ridge]), np.concatenate([weight * gap, ridge.sum(axis=1)]))
    return common * np.maximum(ratio, _LEAST_SCALE)[encoding.kinds]


def _nothing(features: int) -> Inputs:
    return Inputs(np.empty(0), np.empty((0, features)), np.empty(0), np.empty((0, 0)))
