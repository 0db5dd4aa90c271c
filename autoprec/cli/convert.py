"""``autoprec convert``: a model's weights and its plan as files."""

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
    PlanOption,
    RulesOption,
    SeedOption,
    StrictOption,
    TargetOption,
    refuse_overwriting,
)
from autoprec.cli.plan import rules_plan
from autoprec.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from autoprec.plan import Plan


def convert(
    output: Output,
    model: ModelArgument,
    path: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where the weights go; the plan goes beside them as FILE.plan.json.",
            rich_help_panel="Output",
        ),
    ] = Path("model.safetensors"),
    plan: PlanOption = None,
    target: TargetOption = "auto",
    level: LevelOption = "O1",
    formats: FormatsOption = None,
    mode: ModeOption = None,
    rules: RulesOption = None,
    keep: KeepOption = None,
    strict: StrictOption = False,
    seed: SeedOption = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Convert a model, by a plan or by rules, and write its weights (safetensors) and its plan."""
    import autoprec
    from autoprec.planfile import load_plan

    plan_path = path.with_name(f"{path.stem}.plan.json")
    refuse_overwriting(path, plan_path, force=force)
    named = load_model(model, seed)
    if plan is not None:
        chosen = load_plan(plan)
    else:
        chosen = rules_plan(
            named, target=target, level=level, formats=formats, mode=mode or named.mode, rules=rules, keep=keep
        )
    autoprec.convert(named.module, plan=chosen, example_inputs=named.example_inputs, strict=strict)
    write_weights(named, chosen, path)
    chosen.save(plan_path)
    receipt = autoprec.receipt(named.module)
    if as_json:
        output.show_json({"weights": str(path), "plan": str(plan_path), "receipt": receipt.to_json()})
    else:
        output.show(f"{path} and {plan_path}: {receipt}")


def write_weights(named: NamedModel, plan: "Plan", path: Path) -> None:
    """Write the state dict with all its keys; the file's metadata names the plan.

    Raises:
        UsageError: the state dict has something that isn't a tensor, or the file can't be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save

    from autoprec.atomic import write_bytes

    tensors = _unshared(named.module)
    try:
        write_bytes(path, save(tensors, metadata={"format": "pt", "autoprec.plan.sha256": plan.sha256}))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"the weights can't be written to {str(path)!r}: {error}") from error


def _unshared(module: "nn.Module") -> dict:
    """The state dict with a copy of every tensor that shares memory with an earlier one: a file has no ties."""
    from torch import Tensor

    tensors, seen = {}, set()
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise UsageError(
                f"{name!r} in the state dict is a {type(value).__name__}, and safetensors holds tensors only: convert "
                "the model in Python and save it your own way"
            )
        memory = value.untyped_storage().data_ptr()
        tensors[name] = value.detach().clone() if memory in seen else value.detach().contiguous()
        seen.add(memory)
    return tensors
