"""``autoprec targets``: the devices that plans can be made for."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from autoprec.cli.console import Output
from autoprec.cli.options import AsJson

if TYPE_CHECKING:
    from autoprec.target import Target


def targets(
    output: Output,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show one with its sources; auto is this machine's device.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The devices that plans can be made for, or one of them with the source of each number."""
    from autoprec.target import list_targets, load_target

    found = list_targets() if name is None else (load_target(name),)
    if as_json:
        output.show_json([asdict(target) for target in found])
    elif name is None:
        output.show(_table(found))
    else:
        output.show(_one(found[0]))


def _table(found: "tuple[Target, ...]") -> Table:
    table = Table("name", "device", "formats, best first", "16 bit", "peak TFLOP/s", "GB/s", "GiB")
    for target in found:
        table.add_row(
            target.name,
            target.title,
            " ".join(target.formats),
            target.low_format,
            _peaks(target),
            _bandwidth(target),
            _memory(target),
        )
    return table


def _one(target: "Target") -> str:
    fields = [
        ("device", target.title),
        ("formats", " ".join(target.formats)),
        ("16 bit", target.low_format),
        ("peaks", f"{_peaks(target)} TFLOP/s, {'measured here' if target.measured else 'published'}"),
        ("bandwidth", f"{_bandwidth(target)} GB/s"),
        ("memory", f"{_memory(target)} GiB"),
        ("alignment", " ".join(f"{name}:{size}" for name, size in target.alignment.items())),
        ("backends", " ".join(target.backends)),
        ("note", target.note),
    ]
    width = max(len(key) for key, value in fields if value)
    lines = [f"  {key:<{width}}  {value}" for key, value in fields if value]
    numbers_of = {text: [key for key, t in target.sources.items() if t == text] for text in target.sources.values()}
    sources = [f"  {text}\n    for {', '.join(numbers)}" for text, numbers in numbers_of.items()]
    return "\n".join([target.name, *lines, "sources", *sources])


def _peaks(target: "Target") -> str:
    return " ".join(f"{name}:{flops / 1e12:.4g}" for name, flops in target.peaks_flops.items()) or "unknown"


def _bandwidth(target: "Target") -> str:
    rate = target.bandwidth_bytes_per_s
    return "unknown" if rate is None else f"{rate / 1e9:.4g}"


def _memory(target: "Target") -> str:
    return "unknown" if target.memory_bytes is None else f"{target.memory_bytes / 2**30:.4g}"
