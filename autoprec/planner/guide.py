"""``rules/guide.toml``: what to use before anything is known but the kind of model, and bytes a parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from autoprec.errors import UsageError
from autoprec.formats import FORMATS
from autoprec.rulebook.shipped import rules_folder
from autoprec.rulebook.tomlfile import Table, read_toml
from autoprec.target import Target

Architecture = Literal["cnn", "transformer", "rnn", "moe", "diffusion", "ssm", "other"]
TaskKind = Literal["pretraining", "finetuning", "inference"]
Stability = Literal["normal", "critical"]

#: What a scheme keeps, by what it is for.
BYTES = ("parameters", "copies", "masters", "gradients", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One entry of the guide.

    Args:
        architectures, tasks, stability: kinds that it is for; empty for any.
        min_params, below_params: sizes that it is for.
        format: of the matrix products.
        why: the reason.
        requires: what it takes.
        source: public evidence.
    """

    architectures: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    stability: tuple[str, ...] = ()
    min_params: float = 0.0
    below_params: float = math.inf
    format: str
    why: str
    requires: tuple[str, ...]
    source: str

    def fits(self, architecture: str, task: str, num_params: float, stability: str) -> bool:
        """Whether it is for such a model."""
        asked = ((self.architectures, architecture), (self.tasks, task), (self.stability, stability))
        named = all(not allowed or value in allowed for allowed, value in asked)
        return named and self.min_params <= num_params < self.below_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Bytes a parameter of one way to train.

    Args:
        name: of the scheme.
        bytes_per_param: by what they are for, see :data:`BYTES`.
        why: what it is.
        source: public evidence.
        quoted: a line of the table that is often quoted.
    """

    name: str
    bytes_per_param: dict[str, float]
    why: str
    source: str
    quoted: bool = False

    def total_bytes(self, num_params: float) -> float:
        """For a model of that size, without activations."""
        return num_params * sum(self.bytes_per_param.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What the quoted table doesn't count; ``bytes_per_param`` is 0 where it doesn't depend on parameters."""

    what: str
    why: str
    bytes_per_param: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """The whole file."""

    advice: tuple[Advice, ...]
    schemes: tuple[Scheme, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What the guide says to one question.

    Args:
        advice: the entry that won.
        passed_over: why better ones didn't: entries whose format the target lacks.
    """

    advice: Advice
    passed_over: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "rule",
            "format": self.advice.format,
            "why": self.advice.why,
            "requires": list(self.advice.requires),
            "source": self.advice.source,
            "passed_over": list(self.passed_over),
        }


@cache
def load_guide() -> Guide:
    """The shipped guide.

    Raises:
        RuleError: the file can't be used.
    """
    return parse_guide(read_toml(rules_folder() / "guide.toml"))


def parse_guide(top: Table) -> Guide:
    """Check the tables of a guide file.

    Raises:
        RuleError: something in it can't be used.
    """
    guide = Guide(
        advice=tuple(_advice(table) for table in top.tables("recommend")),
        schemes=tuple(_scheme(table) for table in top.tables("scheme")),
        left_out=tuple(_left_out(table) for table in top.tables("left_out")),
    )
    top.done()
    if not guide.advice or not guide.schemes:
        raise top.error("needs [[recommend]] and [[scheme]] tables")
    return guide


def _advice(table: Table) -> Advice:
    advice = Advice(
        architectures=_names(table, "architectures", get_args(Architecture)),
        tasks=_names(table, "tasks", get_args(TaskKind)),
        stability=_names(table, "stability", get_args(Stability)),
        min_params=table.number("min_params") if table.has("min_params") else 0.0,
        below_params=table.number("below_params") if table.has("below_params") else math.inf,
        format=table.choice("format", tuple(FORMATS)),
        why=table.text("why"),
        requires=table.texts("requires"),
        source=table.text("source"),
    )
    table.done()
    return advice


def _names(table: Table, key: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = table.texts(key, ())
    for name in names:
        if name not in allowed:
            raise table.error(f"{key} has {name!r}; allowed: {', '.join(allowed)}")
    return names


def _scheme(table: Table) -> Scheme:
    scheme = Scheme(
        name=table.text("name"),
        bytes_per_param={key: table.number(key) for key in BYTES if table.has(key)},
        why=table.text("why"),
        source=table.text("source"),
        quoted=table.choice("quoted", ("yes", "no"), "no") == "yes",
    )
    table.done()
    return scheme


def _left_out(table: Table) -> LeftOut:
    size = table.number("bytes_per_param") if table.has("bytes_per_param") else 0.0
    left_out = LeftOut(what=table.text("what"), why=table.text("why"), bytes_per_param=size)
    table.done()
    return left_out


def recommend(
    architecture: str,
    task: str,
    num_params: float,
    stability: str = "normal",
    target: Target | None = None,
) -> Recommendation:
    """What the guide says.

    Args:
        architecture: see :data:`Architecture`.
        task: see :data:`TaskKind`.
        num_params: of the model.
        stability: ``critical`` for a run that can't be repeated.
        target: a device; None: any, as if it had all formats.

    Raises:
        UsageError: an argument isn't allowed.
    """
    for name, value, allowed in (
        ("architecture", architecture, get_args(Architecture)),
        ("task", task, get_args(TaskKind)),
        ("stability", stability, get_args(Stability)),
    ):
        if value not in allowed:
            raise UsageError(f"{name}={value!r} isn't one of {', '.join(allowed)}")
    if not 0 < num_params < math.inf:
        raise UsageError(f"num_params={num_params!r} must be above 0")
    passed: list[str] = []
    fitting = [a for a in load_guide().advice if a.fits(architecture, task, num_params, stability)]
    for advice in fitting:
        if target is None or _has(target, advice.format):
            return Recommendation(advice=advice, passed_over=tuple(passed))
        passed.append(f"{advice.format}: {target.name} doesn't have it ({advice.why})")
    raise UsageError(f"the guide has no entry for {architecture}, {task}, {num_params:g} parameters, {stability}")


def _has(target: Target, format_name: str) -> bool:
    """AMD's first fp8 is another variant of the same format."""
    return format_name in target.formats or (format_name == "fp8_e4m3" and "fp8_e4m3fnuz" in target.formats)
