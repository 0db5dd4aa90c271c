"""How much each format at each site would hurt training: one forward and backward in fp32 per batch.

When the gradient ``g`` of the loss reaches the result ``Y`` of a matrix product, the product is made again by the very
action that a converted model would run, for each format in turn, forward and backward:

* ``fisher``, the sum of ``g² ΔY²``: the variance of the loss that independent errors ``ΔY`` of the result make;
* ``weight_grad``, ``‖ΔgW‖²``: the error of the weights' gradient;
* ``input_grad``, ``‖ΔgXᵀ X‖²``: the error of the gradient that goes on to the layers before.

The last two are where a gradient's format shows.  Each is divided by its median over all sites and formats, and their
sum is the harm.  Sums of harms over sites rank
whole mixes by the loss they lose in training from a checkpoint (``benchmarks/scores.py``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from autoprec.errors import UsageError
from autoprec.graph.record import record
from autoprec.graph.sandbox import untouched
from autoprec.lower.apply import CONVERSION
from autoprec.lower.foreign import guard_checkpoint
from autoprec.plan import Formats, Mode
from autoprec.rulebook import Rulebook, load_rulebook
from autoprec.tune.posing.gradient_errors import Loss, group_gradient_errors, scalar_loss
from autoprec.tune.posing.replay import Errors
from autoprec.tune.posing.score_pass import Basis, Passes, Scorer
from autoprec.tune.posing.variants import Variants

_log = logging.getLogger("autoprec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one format at one site does; means over the batches.  Infinite where it gives no finite number.

    Args:
        fisher: the sum of ``g² ΔY²``, in squares of the loss; of an ``output`` basis ``‖ΔY‖² / ‖Y‖²``.
        weight_grad: ``‖ΔgW‖²`` over the site's trainable parameters; 0 in inference, and where it has none.
        input_grad: ``‖ΔgXᵀ X‖²`` over the operands that aren't parameters; 0 in inference.
        harm: their sum, each over its median; 0 for fp32.
        basis: what it was taken from.
    """

    fisher: float
    weight_grad: float
    input_grad: float
    harm: float
    basis: Basis


Scores = dict[str, dict[str, Score]]


def score_sites(
    model: nn.Module,
    losses: Sequence[Loss],
    choices: Mapping[str, Sequence[str]],
    formats_of: Callable[[str], Formats],
    *,
    mode: Mode = "training",
    low_format: str = "bf16",
    recipe: Mapping[str, Any] | None = None,
    rulebook: Rulebook | None = None,
) -> Scores:
    """Score every choice of format at every site; the model is left as it was.

    Args:
        model: not converted, at the weights that a study starts from.
        losses: each computes one batch's loss; three are enough.
        choices: id of a matrix product → names of choices.
        formats_of: name → formats by role; ``fp32`` is the reference and isn't asked for.
        mode: in ``inference`` weights have no gradient, and the score is ``fisher`` alone.
        low_format: the 16-bit format of results between products below 16 bit.
        recipe: settings of the fp8 and block formats, as in a plan.
        rulebook: what else decides how a product runs; None is the shipped rules.

    Returns:
        site id → choice → score, for all of ``choices``.

    Raises:
        UsageError: the model is converted, a site isn't a matrix product, or a loss isn't a scalar.
    """
    if CONVERSION in vars(model):
        raise UsageError("scores are errors against fp32, and this model is converted; call autoprec.revert(model)")
    if not losses:
        raise UsageError("losses is empty; give at least one batch's loss")
    guard_checkpoint()
    variants = Variants(model, formats_of, mode, low_format, dict(recipe or {}), rulebook or load_rulebook())
    with _differentiable(model):
        scorer = _passes(model, losses, choices, variants)
        _score_alone(losses, scorer)
    return _scores(scorer, choices, len(losses))


def _passes(
    model: nn.Module, losses: Sequence[Loss], choices: Mapping[str, Sequence[str]], variants: Variants
) -> Scorer:
    """Scores by the loss's gradient; by outputs where there is none."""
    if _has_gradient(losses[0], model):
        scorer = Scorer(model, choices, variants)
        try:
            record(model, Passes(losses, scorer, backward=True), scorer.at_call, grad=True)
        except RuntimeError as error:
            if variants.is_training:
                raise
            _log.warning("sites are scored by the error of their outputs, since a backward raised: %s", error)
        else:
            return scorer
    scorer = Scorer(model, choices, variants)
    record(model, Passes(losses, scorer, backward=False), scorer.at_output)
    return scorer


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Lets gradients flow through a model that is frozen as a whole, and through recurrent layers in evaluation."""
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.is_inference()]
    if any(p.requires_grad for p in model.parameters()):
        frozen = []
    # cuDNN's recurrent kernels have a backward in training only; torch's own have one always
    cudnn = torch.backends.cudnn
    has_cudnn = cudnn.enabled
    evaluates = any(isinstance(module, nn.RNNBase) and not module.training for module in model.modules())
    try:
        cudnn.enabled = has_cudnn and not evaluates
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        cudnn.enabled = has_cudnn
        for parameter in frozen:
            parameter.requires_grad_(False)


def _has_gradient(compute: Loss, model: nn.Module) -> bool:
    with untouched(model), torch.enable_grad():
        return scalar_loss(compute(model)).requires_grad


def _score_alone(losses: Sequence[Loss], scorer: Scorer) -> None:
    """Scores what no gradient reaches by what it does alone: squares of the same units, of the whole model."""
    plans = {(site, choice): scorer.variants.plan_alone(site, choice) for site, choice in scorer.unreached()}
    if not plans:
        return
    variants = scorer.variants
    for loss in losses:
        found = group_gradient_errors(variants.model, (loss,), plans, rulebook=variants.rulebook)
        for (site, choice), error in found.items():
            scorer.basis[site.id] = "alone"
            weight_grad = error.gradient if variants.is_training else 0.0
            scorer.add(site.id, choice, Errors(error.loss, weight_grad))


def _scores(scorer: Scorer, choices: Mapping[str, Sequence[str]], batches: int) -> Scores:
    scales = [
        median([v for v in values if 0 < v < math.inf] or [1.0]) for values in zip(*scorer.sums.values(), strict=True)
    ]

    def score(site: str, choice: str) -> Score:
        sums = scorer.sums[site, choice]
        harm = sum(value / scale for value, scale in zip(sums, scales, strict=True))
        fisher, weight_grad, input_grad = (value / batches for value in sums)
        return Score(fisher=fisher, weight_grad=weight_grad, input_grad=input_grad, harm=harm, basis=scorer.basis[site])

    return {site: {choice: score(site, choice) for choice in names} for site, names in choices.items()}
