"""The passes that a score is taken from: sees each matrix product, waits for its gradient, and makes it again."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from autoprec.errors import BackendError, UsageError
from autoprec.frames.mode import Action
from autoprec.graph.record import Call, floating
from autoprec.graph.site import Site
from autoprec.tune.posing.gradient_errors import Loss, scalar_loss
from autoprec.tune.posing.replay import Errors, Replay, can_replay, versions
from autoprec.tune.posing.variants import REFERENCE, Variants

_log = logging.getLogger("autoprec")

#: What a score was taken from: the loss gradient of one pass; a run with the site ``alone`` in the format, where no
#: gradient reaches it (``no_grad``); its ``output`` only, where the loss has no gradient; or the batches don't call it.
Basis = Literal["gradient", "alone", "output", "uncalled"]


class Scorer:
    """Sees the calls of the passes and adds up each site's errors."""

    def __init__(self, model: nn.Module, choices: Mapping[str, Sequence[str]], variants: Variants) -> None:
        self._choices, self.variants = choices, variants
        trainable = frozenset(id(p) for p in model.parameters() if p.requires_grad)
        self._trainable = trainable if variants.is_training else None
        #: By site and choice, over all calls and batches.
        self.sums = {(site, choice): Errors() for site, names in choices.items() for choice in names}
        self.basis: dict[str, Basis] = dict.fromkeys(choices, "uncalled")
        self._sites: dict[str, Site] = {}
        self.is_backward = False
        self._lost: set[str] = set()  # can't be called again: arguments were written before the gradient came

    def at_call(self, call: Call) -> None:
        """Scores the call when its gradient comes."""
        if not self._is_asked(call):
            return
        outputs = floating(call.out)
        positions = [k for k, out in enumerate(outputs) if out.requires_grad]
        if not positions or not can_replay(call):
            return
        held, written = [call], versions(call)

        def at_gradient(gradients: Sequence[Tensor | None]) -> None:
            if not self.is_backward or not held:  # a backward of the loss's own, for a gradient penalty
                return
            call = held.pop()  # what it holds is free when the site is done
            if versions(call) != written:
                self._lost.add(call.site.id)
                return
            known = [(k, g) for k, g in zip(positions, gradients, strict=True) if g is not None]
            self._score(call, [k for k, _ in known], [g for _, g in known])

        if len(positions) == 1:  # torch's hook on several never comes for what a backward starts from
            outputs[positions[0]].register_hook(lambda gradient: at_gradient([gradient]))
        else:
            register_multi_grad_hook([outputs[k] for k in positions], at_gradient)

    def at_output(self, call: Call) -> None:
        """Scores the call by its result alone, relative to its size."""
        if self._is_asked(call) and can_replay(call):
            self.basis[call.site.id] = "output"
            outputs = floating(call.out)
            size = math.sqrt(sum(float(out.square().sum()) for out in outputs)) or 1.0
            ones = [torch.full_like(out, 1 / size) for out in outputs]
            self._score(call, range(len(outputs)), ones)

    def add(self, site: str, choice: str, errors: Errors) -> None:
        self.sums[site, choice] = Errors(*(a + b for a, b in zip(self.sums[site, choice], errors, strict=True)))

    def unreached(self) -> list[tuple[Site, str]]:
        """Called sites without a score by gradient, with their choices; their sums start again."""
        found = []
        for name, site in self._sites.items():
            if self.basis[name] == "uncalled" or name in self._lost:
                for choice in self._choices[name]:
                    self.sums[name, choice] = Errors()
                    if choice != REFERENCE:
                        found.append((site, choice))
        return found

    def _is_asked(self, call: Call) -> bool:
        site = call.site
        if site.id not in self._choices:
            return False
        if not site.is_gemm:
            raise UsageError(f"site {site.id!r} is {site.op!r}, which is no matrix product; score products only")
        self._sites[site.id] = site
        return True

    def _score(self, call: Call, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        site = call.site
        if self.basis[site.id] == "uncalled":
            self.basis[site.id] = "gradient"
        try:
            replay = Replay(call, positions, gradients, self._trainable)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _log.info("%s can't be called again by itself: %s", site.id, error)
            self._lost.add(site.id)
            return
        for choice in self._choices[site.id]:
            action = None if choice == REFERENCE else self.variants.action(site, choice)
            if action is not None:
                self.add(site.id, choice, _errors(replay, action, call, choice))


def _errors(replay: Replay, action: Action, call: Call, choice: str) -> Errors:
    try:
        return replay.errors(action, call.func)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, BackendError) as error:
        _log.warning("%s can't run in %s: %s", call.site.id, choice, error)
        return Errors(math.inf, math.inf, math.inf)


class Passes:
    """Runs all batches; the recorder's first call, which only fills caches, is one forward."""

    def __init__(self, losses: Sequence[Loss], scorer: Scorer, backward: bool) -> None:
        self._losses, self._scorer, self._backward = losses, scorer, backward
        self._is_warm = False

    def __call__(self, model: nn.Module) -> None:
        if not self._is_warm:
            self._is_warm = True
            with torch.no_grad():
                self._losses[0](model)
            return
        for compute in self._losses:
            loss = compute(model)
            if self._backward:
                self._scorer.is_backward = True
                scalar_loss(loss).backward()
                self._scorer.is_backward = False
                for parameter in model.parameters():
                    parameter.grad = None
