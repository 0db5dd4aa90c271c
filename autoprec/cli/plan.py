"""``autoprec plan``: the plan that the rules give a model."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoprec.cli.console import Output
from autoprec.cli.model import NamedModel, load_model
from autoprec.cli.options import (
    AsJson,
    Force,
    FormatsOption,
    KeepOption,
    LevelOption,
    ModelArgument,
    ModeOption,
    RulesOption,
    SeedOption,
    TargetOption,
    refuse_overwriting,
)

if TYPE_CHECKING:
    from autoprec.plan import Level, Mode, Plan


def plan(
    output: Output,
    model: ModelArgument,
    path: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the plan goes.", rich_help_panel="Output")
    ] = Path("plan.json"),
    target: TargetOption = "auto",
    level: LevelOption = "O1",
    formats: FormatsOption = None,
    mode: ModeOption = None,
    rules: RulesOption = None,
    keep: KeepOption = None,
    seed: SeedOption = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """The plan that the rules and one example batch give a model; nothing is trained."""
    refuse_overwriting(path, force=force)
    named = load_model(model, seed)
    made = rules_plan(
        named, target=target, level=level, formats=formats, mode=mode or named.mode, rules=rules, keep=keep
    )
    made.save(path)
    if as_json:
        output.show_json(made.to_json())
    else:
        output.show(f"{path}: {len(made.rules)} rules for {made.target}, sha256 {made.sha256[:12]}")


def rules_plan(
    named: NamedModel,
    *,
    target: str,
    level: "Level",
    formats: str | None,
    mode: "Mode",
    rules: list[Path] | None,
    keep: list[str] | None,
) -> "Plan":
    """The plan of the rules for a model, with the user's pins first."""
    from autoprec.convert import plan_for
    from autoprec.graph.inputs import as_run
    from autoprec.planner.rules import keep_rules
    from autoprec.rulebook import SiteRule, load_rulebook

    run = None if named.example_inputs is None else as_run(named.example_inputs)
    # as rules of a file of the user's, so that a pin that matches no site is the same error
    pins = tuple(SiteRule(rule=rule, file="--keep") for rule in keep_rules(keep or ()))
    rulebook = load_rulebook(*rules or ())
    pinned = replace(rulebook, sites=(*pins, *rulebook.sites))
    return plan_for(named.module, target, run, level, mode, formats, pinned)
