"""``autoprec formats``: the number formats."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from autoprec.cli.console import Output
from autoprec.cli.options import AsJson


def formats(output: Output, as_json: AsJson = False) -> None:
    """The number formats: bits, range, block and scale."""
    from autoprec.formats import FORMATS

    rows = [{**asdict(fmt), "torch_dtype": _dtype_name(fmt.torch_dtype)} for fmt in FORMATS.values()]
    if as_json:
        return output.show_json(rows)
    table = Table(
        "format", "bits", "exponent", "mantissa", "max", "smallest normal", "smallest", "block", "scale", "torch dtype"
    )
    for row in rows:
        table.add_row(*(_cell(value) for value in _in_columns(row)))
    output.show(table)


def _in_columns(row: dict[str, Any]) -> list[Any]:
    numbers = [f"{row[key]:.6g}" for key in ("max", "smallest_normal", "smallest_subnormal")]
    bits = [row[key] for key in ("name", "bits", "exponent_bits", "mantissa_bits")]
    return [*bits, *numbers, row["block_size"], row["scale_format"], row["torch_dtype"]]


def _cell(value: Any) -> str:
    return "–" if value is None else str(value)


def _dtype_name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
