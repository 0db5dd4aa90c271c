"""A model of time, or of the loss gap, that is a sum over groups plus a smooth remainder.

A Gaussian process: mean ``X m``, covariance ``X diag(v) X' + s s' ρ^(groups that differ)``.  The first part learns what
each choice costs, the second what choices cost together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_RHO = 0.6
#: A step's own constants, such as the optimizer, don't depend on the mix; casts and dispatch do, in any mix.
_TIME_REMAINDER = 0.03


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The process after what was measured.

    Args:
        mean, sd: of each choice's own effect, shape ``(choices,)``.
        offset: of any mix without one.
    """

    offset: float
    prior_mean: np.ndarray
    prior_var: np.ndarray
    remainder_sd: float
    onehot: np.ndarray
    mixes: np.ndarray
    solve: np.ndarray
    weights: np.ndarray
    mean: np.ndarray
    sd: np.ndarray

    def predict(self, onehot: np.ndarray, mixes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each mix."""
        cross = self._kernel(onehot, mixes, self.onehot, self.mixes)
        mean = self.offset + onehot @ self.prior_mean + cross @ self.weights
        own = (onehot**2) @ self.prior_var + self.remainder_sd**2
        var = own - np.einsum("ij,jk,ik->i", cross, self.solve, cross)
        return mean, np.sqrt(np.maximum(var, 1e-16))

    def _kernel(self, onehot_a: np.ndarray, a: np.ndarray, onehot_b: np.ndarray, b: np.ndarray) -> np.ndarray:
        return kernel(onehot_a, a, onehot_b, b, self.prior_var, self.remainder_sd)


def kernel(
    onehot_a: np.ndarray, a: np.ndarray, onehot_b: np.ndarray, b: np.ndarray, var: np.ndarray, remainder_sd: float
) -> np.ndarray:
    """Covariance between two lists of mixes, ``(len(a), len(b))``."""
    differing = (a[:, None, :] != b[None, :, :]).sum(axis=2)
    return (onehot_a * var) @ onehot_b.T + remainder_sd**2 * _RHO**differing


def fit(
    onehot: np.ndarray,
    mixes: np.ndarray,
    y: np.ndarray,
    *,
    offset: float,
    prior_mean: np.ndarray,
    prior_sd: np.ndarray,
    remainder_sd: float,
    noise_sd: np.ndarray,
) -> Surrogate:
    """Condition the process on measured mixes."""
    var = prior_sd**2
    covariance = kernel(onehot, mixes, onehot, mixes, var, remainder_sd) + np.diag(noise_sd**2)
    solve = np.linalg.pinv(covariance, hermitian=True)
    weights = solve @ (y - offset - onehot @ prior_mean)
    own = onehot * var
    mean = prior_mean + own.T @ weights
    sd = np.sqrt(np.maximum(var - np.einsum("ji,jk,ki->i", own, solve, own), 0.0))
    return Surrogate(offset, prior_mean, var, remainder_sd, onehot, mixes, solve, weights, mean, sd)


def time_surrogate(
    prior: np.ndarray, onehot: np.ndarray, mixes: np.ndarray, time: np.ndarray, time_sd: np.ndarray
) -> Surrogate:
    """Model of the step's time in units of the baseline's.

    Args:
        prior: guessed change of time per choice; its error may be as large as itself.
        onehot: measured mixes, ``(n, choices)``.
        mixes: the same as choice numbers, ``(n, groups)``.
        time, time_sd: measured, ``(n,)``.
    """
    return fit(
        onehot,
        mixes,
        time,
        offset=1.0,
        prior_mean=prior,
        prior_sd=np.where(prior == 0, 1e-4, np.abs(prior) + 0.03),
        remainder_sd=_TIME_REMAINDER,
        noise_sd=time_sd,
    )


def gap_surrogate(
    prior: np.ndarray, onehot: np.ndarray, mixes: np.ndarray, gap: np.ndarray, budget: float, noise: float
) -> Surrogate:
    """Model of the loss gap.

    Args:
        prior: guessed harm per choice, of which only the proportions count.
        onehot, mixes: see :func:`time_surrogate`.
        gap: measured, ``(n,)``.
        budget: largest allowed gap.
        noise: standard deviation of a measured gap.
    """
    predicted = onehot @ prior
    if predicted.any():
        weights = 1 / (np.abs(gap) + budget / 2) ** 2
        scale = (weights * predicted * gap).sum() / (weights * predicted**2).sum()
    else:
        scale = 0.0
    # nothing measured, or gaps at the level of noise: let the worst choices together cost a tenth of the budget
    floor = 0.1 * budget / max(prior.sum(), 1e-30)
    mean = prior * max(scale, 0.1 * floor if predicted.any() else floor)
    groups = max(1, mixes.shape[1])
    spread = 0.4 * max(budget, float(np.median(np.abs(gap))) if len(gap) else 0.0) / np.sqrt(groups)
    return fit(
        onehot,
        mixes,
        gap,
        offset=0.0,
        prior_mean=mean,
        prior_sd=np.where(prior == 0, 1e-3 * budget, mean + spread),
        remainder_sd=0.1 * budget,
        noise_sd=np.sqrt(noise**2 + (0.02 * budget) ** 2 + (0.05 * np.minimum(np.abs(gap), 5 * budget)) ** 2),
    )
