"""What each choice of format does to a matrix product: what a model converted to it does there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autoprec.frames.mode import Action
from autoprec.graph.site import Site
from autoprec.lower.apply import FrameBuilder
from autoprec.plan import Formats, Mode, Plan, PlanRule
from autoprec.rulebook import Rulebook

#: The choice that all others are compared with.
REFERENCE = "fp32"


class Variants:
    """What each choice does to a product: the actions of a model converted to it as a whole, and plans of one site."""

    def __init__(
        self,
        model: nn.Module,
        formats_of: Callable[[str], Formats],
        mode: Mode,
        low_format: str,
        recipe: dict[str, Any],
        rulebook: Rulebook,
    ) -> None:
        self.model, self.rulebook = model, rulebook
        self._mode: Mode = mode
        self._formats_of, self._low, self._recipe = formats_of, low_format, recipe
        self._builders: dict[str, FrameBuilder] = {}
        self._actions: dict[tuple[str, str], Action | None] = {}

    @property
    def is_training(self) -> bool:
        return self._mode == "training"

    def action(self, site: Site, choice: str) -> Action | None:
        """What a converted model does at the site; None if it does what fp32 does."""
        key = (site.id, choice)
        if key not in self._actions:
            if choice not in self._builders:
                self._builders[choice] = FrameBuilder(self._plan("*", choice), self.rulebook)
            frame = self._builders[choice].frame(site.module, self.model.get_submodule(site.module), site.method)
            self._actions[key] = frame.actions.get(site.op)
        return self._actions[key]

    def plan_alone(self, site: Site, choice: str) -> Plan:
        """All in fp32 but this site."""
        return self._plan(site.id or site.aliases[-1], choice)

    def _plan(self, glob: str, choice: str) -> Plan:
        rules = (
            PlanRule(match=(glob,), formats=self._formats_of(choice)),
            PlanRule(match=("*::*",), formats=Formats.all(REFERENCE)),
            # never reached: it names the 16-bit format of results
            PlanRule(match=("*::*",), formats=Formats.all(self._low)),
        )
        return Plan(rules=rules, mode=self._mode, recipe=self._recipe)
