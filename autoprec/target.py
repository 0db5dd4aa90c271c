"""A target: one device with its formats, peaks, bandwidth, memory and alignment; every number with its source."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, cast, get_args

from autoprec.errors import TargetError
from autoprec.formats import FORMATS
from autoprec.rulebook.shipped import rules_folder
from autoprec.rulebook.tomlfile import Table, read_toml

Kind = Literal["cuda", "rocm", "cpu", "hpu", "neuron", "npu", "mlu", "mps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One device.

    Args:
        name: ``h100``; of a probed device the shipped target that fits it, else its own name.
        title: the exact product, for a reader.
        kind: how torch reaches it.
        formats: those that run at native speed, the fastest that training can use first.
        low_format: the 16-bit format of O1: ``bf16`` where it is fast, else ``fp16``, else ``fp32``.
        peaks_flops: dense multiply-adds times two per second, by format; unknown is absent.
        bandwidth_bytes_per_s: of the device's main memory; None if unknown.
        memory_bytes: of the device; None if unknown. A datasheet's GB are read as 10^9 bytes, the safe side.
        alignment: by format, the number that a GEMM's dimensions must be (fp8, block formats) or had better be (16 bit)
            a multiple of.
        backends: that exist for the device, in order of preference.
        device_names: globs over the name that the driver gives the device.
        cpu_flags: processor flags without which a CPU isn't this target.
        sources: where each number comes from: ``peaks_flops.bf16`` → address and date.
        measured: the numbers were measured on this machine, not published.
        note: what a reader must know.
    """

    name: str
    title: str
    kind: Kind
    formats: tuple[str, ...]
    low_format: str
    peaks_flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth_bytes_per_s: float | None = None
    memory_bytes: int | None = None
    alignment: Mapping[str, int] = field(default_factory=dict)
    backends: tuple[str, ...] = ()
    device_names: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    measured: bool = False
    note: str = ""

    @property
    def source(self) -> str:
        """All sources in one line."""
        return "; ".join(dict.fromkeys(self.sources.values()))

    def peak(self, format_name: str) -> float:
        """FLOP/s of a format.

        Raises:
            TargetError: it isn't known.
        """
        if format_name not in self.peaks_flops:
            known = ", ".join(self.peaks_flops) or "none"
            raise TargetError(f"the peak of {format_name} on {self.name} isn't known; known: {known}")
        return self.peaks_flops[format_name]

    def align(self, format_name: str) -> int:
        """The multiple for a GEMM's dimensions in this format; 1 if there is none."""
        return self.alignment.get(format_name, 1)


def load_target(name: str | os.PathLike[str] = "auto") -> Target:
    """A target by name, from a TOML file of one's own, or ``"auto"``: the device in this machine.

    Raises:
        TargetError: no such target.
        RuleError: the file can't be used.
    """
    if name == "auto":
        from autoprec.probe import probe_target

        return probe_target()
    if str(name).endswith(".toml"):
        return parse_target(read_toml(Path(name)))
    return _shipped_target(str(name))


def list_targets() -> tuple[Target, ...]:
    """The shipped targets, by name."""
    return tuple(_shipped_target(name) for name in _shipped_names())


@cache
def _shipped_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (rules_folder() / "targets").glob("*.toml")))


@cache
def _shipped_target(name: str) -> Target:
    names = _shipped_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise TargetError(f"no target {name!r}; {hint}known: auto, {', '.join(names)}, or the path of a .toml file")
    return parse_target(read_toml(rules_folder() / "targets" / f"{name}.toml"))


def parse_target(top: Table) -> Target:
    """Check the table of a target file.

    Raises:
        RuleError: something in it can't be used.
    """
    sources = {key: _source(top.table("sources").table(key)) for key in top.table("sources")}
    numbers = _Numbers(top, sources)
    allowed = tuple(FORMATS)
    formats = top.texts("formats")
    unknown = [name for name in formats if name not in allowed]
    if unknown:
        raise top.error(f"formats has {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    memory = numbers.one("memory_bytes")
    target = Target(
        name=top.text("name"),
        title=top.text("title"),
        kind=cast(Kind, top.choice("kind", get_args(Kind))),
        formats=formats,
        low_format=top.choice("low_format", ("bf16", "fp16", "fp32")),
        peaks_flops=numbers.per_format("peaks_flops"),
        bandwidth_bytes_per_s=numbers.one("bandwidth_bytes_per_s"),
        memory_bytes=None if memory is None else int(memory),
        alignment={name: int(value) for name, value in numbers.per_format("alignment").items()},
        backends=top.texts("backends"),
        device_names=top.texts("device_names", ()),
        cpu_flags=top.texts("cpu_flags", ()),
        sources=numbers.sources,
        note=top.text("note", ""),
    )
    top.done()
    return target


def _source(table: Table) -> str:
    text = f"{table.text('url')} ({table.text('date')})"
    if table.has("how"):
        text += f": {table.text('how')}"
    table.done()
    return text


class _Numbers:
    """Reads numbers of the form ``{ value = 312e12, source = "datasheet" }`` and notes their sources."""

    def __init__(self, top: Table, sources: Mapping[str, str]) -> None:
        self._top = top
        self._known = sources
        self.sources: dict[str, str] = {}

    def one(self, key: str) -> float | None:
        table = self._top.table(key)
        return self._read(table, key) if self._top.has(key) else None

    def per_format(self, key: str) -> dict[str, float]:
        table = self._top.table(key)
        for name in table:
            if name not in FORMATS:
                raise table.error(f"{name!r} isn't a format; allowed: {', '.join(FORMATS)}")
        values = {name: self._read(table.table(name), f"{key}.{name}") for name in table}
        table.done()
        return values

    def _read(self, table: Table, key: str) -> float:
        value = table.number("value")
        self.sources[key] = self._known[table.choice("source", self._known)]
        table.done()
        return value
