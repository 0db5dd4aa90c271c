"""``autoprec memory``: bytes that training a model takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from autoprec.cli.console import Output
from autoprec.cli.options import AsJson, SeedOption, TargetOption
from autoprec.cli.recommend import parse_count
from autoprec.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from autoprec.cli.model import NamedModel
    from autoprec.estimate import Estimate
    from autoprec.planner.guide import Guide, LeftOut

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A model as far as memory needs to know it.

    Args:
        name: for a reader.
        num_params: each counted once.
        beside: what was estimated beside the table: title → estimate.
    """

    name: str
    num_params: float
    beside: dict[str, Estimate]


def memory(
    output: Output,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A built-in task, or file.py:name or pkg.mod:name of a task or model."),
    ] = None,
    params: Annotated[
        str | None,
        typer.Option("--params", metavar="NUMBER", help="Of parameters: 70e9 or 70B.", rich_help_panel="Model"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="PATH", help="A transformers config.json, or its folder.", rich_help_panel="Model"
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Sequences, with --config.", rich_help_panel="Model")
    ] = 1,
    length: Annotated[
        int, typer.Option("--length", min=1, help="Tokens of each, with --config.", rich_help_panel="Model")
    ] = 2048,
    target: TargetOption = "auto",
    seed: SeedOption = 0,
    as_json: AsJson = False,
) -> None:
    """Bytes that training takes: parameters, gradients, optimizer, and activations where inputs are known."""
    from autoprec.planner.guide import load_guide

    if sum(given is not None for given in (model, params, config)) != 1:
        raise UsageError("give one of MODEL, --params NUMBER and --config PATH")
    if params is not None:
        sized = Sized(name=f"{params} parameters", num_params=parse_count(params), beside={})
    elif config is not None:
        sized = _from_config(config, batch, length)
    else:
        sized = _from_model(str(model), target, seed)
    guide = load_guide()
    if as_json:
        return output.show_json(to_json(guide, sized))
    output.show(f"{sized.name}: {sized.num_params:,.0f} parameters; estimated, in GB of 10^9 bytes")
    output.show(_table(guide, sized.num_params))
    for title, estimate in sized.beside.items():
        parts = ", ".join(f"{name} {_gb(value)}" for name, value in estimate.parts.items())
        output.show(f"{title}: {_gb(estimate.value)} GB (estimated): {parts}")
        for assumption in estimate.assumptions:
            output.note(f"  assumed: {assumption}")
    output.show("fp32, fp16 and mixed are the table that is often quoted. It leaves out:")
    output.show("\n".join(_left_out_line(item, sized.num_params) for item in guide.left_out))


def to_json(guide: Guide, sized: Sized) -> dict[str, Any]:
    """All that the command knows, as JSON values."""
    return {
        "kind": "estimated",
        "model": sized.name,
        "num_params": sized.num_params,
        "schemes": [
            {
                "name": scheme.name,
                "bytes": {key: size * sized.num_params for key, size in scheme.bytes_per_param.items()},
                "total_bytes": scheme.total_bytes(sized.num_params),
                "why": scheme.why,
                "source": scheme.source,
            }
            for scheme in guide.schemes
        ],
        "left_out": [
            {"what": item.what, "bytes": item.bytes_per_param * sized.num_params or None, "why": item.why}
            for item in guide.left_out
        ],
        "beside": {title: estimate.to_json() for title, estimate in sized.beside.items()},
    }


def _table(guide: Guide, num_params: float) -> Table:
    from autoprec.planner.guide import BYTES

    table = Table("scheme", *BYTES, "total", "why")
    for scheme in guide.schemes:
        cells = [_gb(scheme.bytes_per_param.get(key, 0.0) * num_params) for key in BYTES]
        table.add_row(scheme.name, *cells, _gb(scheme.total_bytes(num_params)), scheme.why)
    return table


def _left_out_line(item: LeftOut, num_params: float) -> str:
    size = f" ({_gb(item.bytes_per_param * num_params)} GB here)" if item.bytes_per_param else ""
    return f"  {item.what}{size}: {item.why}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / _GB:.4g}" if num_bytes else "–"


def _from_model(spec: str, target: str, seed: int) -> Sized:
    from autoprec.cli.model import load_model

    named = load_model(spec, seed)
    num_params = sum(p.numel() for p in named.module.parameters())
    beside = {} if named.example_inputs is None else _peaks(named, target, num_params)
    return Sized(name=spec, num_params=num_params, beside=beside)


def _peaks(named: NamedModel, target: str, num_params: int) -> dict[str, Estimate]:
    """The peak of a step on the example inputs, in fp32 and under the plan of the rules."""
    from autoprec.analyze import analyze
    from autoprec.estimate import estimate_memory
    from autoprec.graph.site import Site
    from autoprec.lower.matching import RuleMatcher
    from autoprec.plan import Formats
    from autoprec.planner.rules import low_format, plan_by_rules
    from autoprec.rulebook import load_rulebook
    from autoprec.target import load_target

    device = load_target(target)
    analysis = analyze(named.module, named.example_inputs, target=device, mode=named.mode)
    plan = plan_by_rules(named.module, device, load_rulebook(), analysis=analysis, mode=named.mode)
    matcher = RuleMatcher(plan)

    def by_plan(site: Site) -> Formats | None:
        rule = matcher.rule_for_site(site.scope, site.op, site.index)
        return None if rule is None else rule.formats

    rows, low = analysis.rows, low_format(device, "O1", None)
    in_fp32 = estimate_memory(rows, lambda _: Formats.all("fp32"), num_params=num_params, low="fp32", mode=named.mode)
    planned = estimate_memory(rows, by_plan, num_params=num_params, low=low, mode=named.mode)
    return {"peak of a step in fp32": in_fp32, f"peak of a step by the plan for {device.name}": planned}


def _from_config(path: Path, batch: int, length: int) -> Sized:
    from autoprec.estimate.activations import transformer_activations

    config, num_params = _read_config(path)
    beside = {}
    text = config.get_text_config()
    sizes: list[Any] = [getattr(text, name, None) for name in ("hidden_size", "num_hidden_layers", "vocab_size")]
    if all(isinstance(size, int) for size in sizes):
        width, layers, vocabulary = sizes
        title = f"activations of {batch} x {length} tokens"
        beside[title] = transformer_activations(
            width=width, layers=layers, vocabulary=vocabulary, batch=batch, length=length
        )
    return Sized(name=str(path), num_params=num_params, beside=beside)


def _read_config(path: Path) -> tuple[Any, int]:
    """The config and the number of parameters of its model, which is built without memory."""
    import torch

    if not path.exists():
        raise UsageError(f"--config {path}: no such file or folder; give a config.json, or the folder that holds it")
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("--config needs transformers: pip install 'autoprec[hf]'") from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        names = config.architectures or ()
        cls = getattr(transformers, names[0], None) if names else None
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config) if cls is None else cls(config)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"--config {path}: transformers can't build a model of it: {error}") from error
    return config, sum(p.numel() for p in model.parameters())
