"""``autoprec inspect``: the sites of a model, and which precision each needs."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from autoprec.cli.console import Output
from autoprec.cli.model import load_model
from autoprec.cli.options import AsJson, ModelArgument, ModeOption, RulesOption, SeedOption, TargetOption
from autoprec.errors import UsageError

if TYPE_CHECKING:
    from autoprec.analyze import Analysis, SiteReport


def inspect(
    output: Output,
    model: ModelArgument,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="SITE", help="Tell all about one site.", rich_help_panel="Output")
    ] = None,
    show_all: Annotated[
        bool,
        typer.Option("--all", help="Every site, not only GEMMs and what was found.", rich_help_panel="Output"),
    ] = False,
    target: TargetOption = "auto",
    mode: ModeOption = None,
    rules: RulesOption = None,
    seed: SeedOption = 0,
    as_json: AsJson = False,
) -> None:
    """The sites of a model with shapes, FLOPs, tag and reason; runs it on one example batch."""
    from autoprec.analyze import analyze
    from autoprec.rulebook import load_rulebook

    named = load_model(model, seed)
    if named.example_inputs is None:
        raise UsageError(f"{model} is a module without example inputs: return (module, example_inputs) to inspect it")
    analysis = analyze(
        named.module,
        named.example_inputs,
        target=target,
        rulebook=load_rulebook(*rules or ()),
        mode=mode or named.mode,
    )
    if explain is not None:
        row = _row(analysis, explain)
        return output.show_json(row.to_json()) if as_json else output.show(explanation(analysis, row))
    if as_json:
        return output.show_json(analysis.to_json())
    rows = [row for row in analysis.rows if show_all or row.site.is_gemm or row.source != "op"]
    output.show(sites_table(analysis, rows))
    share = f"{analysis.low_flops_share():.1%} of matmul and convolution FLOPs may run in {analysis.low_format}"
    output.show(f"{len(analysis.rows)} sites; {share} on {analysis.target}")
    if len(rows) < len(analysis.rows):
        output.note(f"{len(analysis.rows) - len(rows)} sites that do as their op's rule says aren't shown: --all")
    for module, reason in analysis.refused.items():
        output.note(f"module {module} couldn't be watched: {reason}")


def sites_table(analysis: Analysis, rows: list[SiteReport]) -> Table:
    """One line a site; the tag is the one for the target's 16-bit format."""
    errors = [f"error {name}" for name in analysis.formats]
    table = Table("site", "shapes", "FLOPs", f"tag for {analysis.low_format}", "source", "max", *errors, "reason")
    total = sum(site.flops for site in analysis.sites)
    for row in rows:
        verdict = row.verdict(analysis.low_format)
        table.add_row(
            Text(row.site.id),
            Text(_shapes(row)),
            f"{row.site.flops / total:.1%}" if row.site.flops else "",
            Text(verdict.tag, style="bold" if verdict.tag == "fp32" else ""),
            verdict.source,
            "" if row.max_abs is None else f"{row.max_abs:.3g}",
            *(_error(row, name) for name in analysis.formats),
            Text(verdict.reason),
        )
    return table


def explanation(analysis: Analysis, row: SiteReport) -> str:
    """The whole story of one site."""
    site = row.site
    lines = [
        f"{site.id}: {site.op}, {_shapes(row)}, {site.flops:,} FLOPs, {site.num_params:,} parameters",
        "a plan's rule finds it as " + ", ".join(site.aliases),
    ]
    for name, verdict in row.verdicts.items():
        lines.append(f"{name}: {verdict.tag} ({verdict.source}): {verdict.reason}")
        if name in row.errors:
            lines.append(f"  relative error of its result when it runs in {name}: {row.errors[name]:.2g}")
        if name in row.gradient_errors:
            lines.append(f"  relative error of its parameters' gradient in {name}: {row.gradient_errors[name]:.2g}")
    if row.max_abs is not None:
        lines.append(f"largest magnitude of its results: {row.max_abs:.4g}")
    for title, sites in (("reads", row.producers), ("read by", row.consumers)):
        found = [f"{other} ({analysis.by_id[other].tag})" if other in analysis.by_id else other for other in sites]
        lines.append(f"{title}: {', '.join(found) or 'no other site'}")
    return "\n".join(lines)


def _row(analysis: Analysis, name: str) -> SiteReport:
    for row in analysis.rows:
        if name == row.site.id or name in row.site.aliases:
            return row
    near = difflib.get_close_matches(name, analysis.by_id, n=3, cutoff=0.3)
    raise UsageError(
        f"the model has no site {name!r}; near it: {', '.join(near or list(analysis.by_id)[:3]) or 'none'}"
    )


def _shapes(row: SiteReport) -> str:
    shapes = ["x".join(map(str, shape)) or "scalar" for shape in (*row.site.input_shapes, *row.site.output_shapes)]
    return f"{', '.join(shapes[:-1])} -> {shapes[-1]}" if len(shapes) > 1 else "".join(shapes)


def _error(row: SiteReport, name: str) -> str:
    return f"{row.errors[name]:.1e}" if name in row.errors else ""
