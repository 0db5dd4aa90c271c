"""The planner's question as plain numbers: per group of sites the harm and the cost of each format, and casts between.

It can be written to JSON and solved anywhere, without the model or the device it came from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from autoprec.atomic import write_text
from autoprec.errors import UsageError

SCHEMA_VERSION = 1

#: Storage of a choice that follows its neighbours: it never needs a cast.
ANY_STORAGE = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One format that a group may take.

    Args:
        format: its name; a group's first option is the reference.
        harm: what it adds to the loss gap, in any unit that is the same for all; 0 for the reference.
        cost_s: seconds of a step that the group takes in it.
        storage: 16- or 32-bit format of what it reads and gives; :data:`ANY_STORAGE` follows its neighbours.
        firm_storage: the same at firm edges; ``storage`` by default.
    """

    format: str
    harm: float
    cost_s: float
    storage: str = ANY_STORAGE
    firm_storage: str | None = None

    def stored(self, *, firm: bool) -> str:
        """The format at one kind of edge."""
        return self.storage if self.firm_storage is None or not firm else self.firm_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemGroup:
    """Sites that get the same format, and what they may get."""

    name: str
    options: tuple[Option, ...]

    def option(self, format_name: str) -> Option:
        """The option of that name.

        Raises:
            UsageError: the group has none.
        """
        for option in self.options:
            if option.format == format_name:
                return option
        allowed = ", ".join(option.format for option in self.options)
        raise UsageError(f"group {self.name!r} can't take {format_name!r}; allowed: {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Tensors that go between two groups.

    Args:
        a, b: the groups.
        cast_s: seconds of a step where the two store them differently.
        firm: one end is an op with a format of its own even in a choice that lets others follow their neighbours.
    """

    a: str
    b: str
    cast_s: float
    firm: bool = False


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Choose one option for each group.

    Args:
        groups: in order of execution.
        edges: between them; edges inside a group cost nothing.
        fixed_s: seconds of a step that no choice changes, such as the optimizer's.
        kind: whether the seconds were ``measured`` on a device here or are ``estimated``.
        device: that the seconds are for.
    """

    groups: tuple[ProblemGroup, ...]
    edges: tuple[Edge, ...] = ()
    fixed_s: float = 0.0
    kind: Literal["measured", "estimated"] = "estimated"
    device: str = ""

    def __post_init__(self) -> None:
        names = {group.name for group in self.groups}
        if len(names) != len(self.groups) or not all(group.options for group in self.groups):
            raise UsageError("a problem's groups need names of their own and at least one option each")
        for edge in self.edges:
            if not {edge.a, edge.b} <= names:
                raise UsageError(f"edge {edge.a!r} – {edge.b!r} names a group that the problem hasn't")
        numbers = [number for group in self.groups for o in group.options for number in (o.harm, o.cost_s)]
        if not all(map(math.isfinite, [*numbers, *(edge.cast_s for edge in self.edges), self.fixed_s])):
            raise UsageError("a problem's harms and costs must be finite numbers")
        if any(edge.cast_s < 0 for edge in self.edges):
            raise UsageError("a problem's casts must take 0 seconds or more")

    def harm(self, mix: Mapping[str, str]) -> float:
        """Sum of the harms of one format for each group."""
        return sum(group.option(mix[group.name]).harm for group in self.groups)

    def cost_s(self, mix: Mapping[str, str]) -> float:
        """Seconds of a step: the groups', the casts between them, and what is fixed."""
        chosen = {group.name: group.option(mix[group.name]) for group in self.groups}
        casts = 0.0
        for edge in self.edges:
            a, b = (chosen[end].stored(firm=edge.firm) for end in (edge.a, edge.b))
            casts += edge.cast_s if ANY_STORAGE not in (a, b) and a != b else 0.0
        return self.fixed_s + casts + sum(option.cost_s for option in chosen.values())

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as JSON, replacing the file atomically."""
        write_text(Path(path), json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def problem_from_json(data: Mapping[str, Any]) -> Problem:
    """The problem that :meth:`Problem.to_json` gave.

    Raises:
        UsageError: the data is something else.
    """
    if data.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(f"a problem of schema_version {data.get('schema_version')!r}; allowed: {SCHEMA_VERSION}")
    try:
        groups = tuple(
            ProblemGroup(name=group["name"], options=tuple(Option(**option) for option in group["options"]))
            for group in data["groups"]
        )
        edges = tuple(Edge(**edge) for edge in data["edges"])
        return Problem(groups=groups, edges=edges, **{key: data[key] for key in ("fixed_s", "kind", "device")})
    except (KeyError, TypeError) as error:
        raise UsageError(f"not a problem as Problem.to_json writes it: {type(error).__name__}: {error}") from error


def load_problem(path: str | PathLike[str]) -> Problem:
    """The problem in a file that :meth:`Problem.save` wrote.

    Raises:
        UsageError: the file can't be read, or holds something else.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read as a problem: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no problem but a {type(data).__name__}; autoprec tune writes problem.json")
    return problem_from_json(data)
