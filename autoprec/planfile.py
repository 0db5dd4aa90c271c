"""A plan as a JSON file: written in one step, checked value by value when it is read.  Loading one never runs code."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from autoprec.atomic import write_text
from autoprec.errors import PlanFileError, UsageError
from autoprec.jsonvalues import Problem, describe, parse, plain, read_fields
from autoprec.plan import RULE_FORMATS, SCHEMA_VERSION, Formats, Plan, PlanRule, ScalerSettings

#: A larger file is refused unread; a plan with a rule for each of 100,000 sites has 26 MiB.
MAX_BYTES = 64 * 2**20

_T = TypeVar("_T")
_ROLES = tuple(f.name for f in fields(Formats))
_DEFAULTS = {f.name: f.default for f in fields(PlanRule)}


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan; see :meth:`Plan.save`."""
    text = json.dumps(to_json(plan), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        write_text(path, text)
    except (OSError, ValueError) as error:
        raise PlanFileError(f"plan {os.fspath(path)!r} can't be written: {_reason(error)}") from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan and check all of it.  Nothing in the file is run or unpickled.

    Args:
        path: a file that :meth:`Plan.save` wrote, or one written by hand after ``autoprec/plan.schema.json``.

    Raises:
        PlanFileError: the file can't be read, or isn't a valid plan; the message names the place in it.
    """
    name = os.fspath(path)
    try:
        if not Path(path).is_file():
            raise PlanFileError(f"plan {name!r} isn't a file: give the path of a plan.json")
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PlanFileError(f"plan {name!r} can't be read: {_reason(error)}") from error
    if len(data) > MAX_BYTES:
        raise PlanFileError(f"plan {name!r} is over {MAX_BYTES // 2**20} MiB: that's no plan, give a plan.json")
    try:
        return from_json(data)
    except PlanFileError as error:
        raise PlanFileError(f"plan {name!r}: {error}") from None


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; see :meth:`Plan.to_json`."""
    try:
        document = _document(plan)
        # what is written can be read again, or isn't written
        _read_plan(document)
    except Problem as problem:
        raise PlanFileError(f"this plan has no JSON form: {problem}") from None
    return {**document, "sha256": _digest(document)}


def from_json(document: dict[str, Any] | str | bytes) -> Plan:
    """The plan in a JSON document; see :meth:`Plan.from_json`."""
    try:
        return _read_plan(parse(document) if isinstance(document, str | bytes) else plain(document, "$"))
    except Problem as problem:
        raise PlanFileError(str(problem)) from None


def digest(plan: Plan) -> str:
    """SHA-256 over the canonical form: sorted keys, no spaces, whole floats as integers."""
    try:
        return _digest(_document(plan))
    except Problem as problem:
        raise PlanFileError(f"this plan has no JSON form: {problem}") from None


def _digest(document: dict[str, Any]) -> str:
    canonical = json.dumps(_canonical(document), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _canonical(value: Any) -> Any:
    # other writers of JSON (jq, JavaScript) drop the ".0"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2.0**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return [_canonical(item) for item in value] if isinstance(value, list) else value


def _document(plan: Plan) -> dict[str, Any]:
    document = {f.name: getattr(plan, f.name) for f in fields(plan)}
    document["rules"] = [_rule_document(rule) for rule in plan.rules]
    document["scaler"] = {f.name: getattr(plan.scaler, f.name) for f in fields(plan.scaler)}
    return plain({**document, "schema_version": SCHEMA_VERSION}, "$")


def _rule_document(rule: PlanRule) -> dict[str, Any]:
    roles = {role: getattr(rule.formats, role) for role in _ROLES}
    chosen = {"format": rule.formats.input} if len(set(roles.values())) == 1 else {"formats": roles}
    rest = {f.name: getattr(rule, f.name) for f in fields(rule) if f.name not in ("match", "formats")}
    return {"match": rule.match, **chosen, **{name: value for name, value in rest.items() if value != _DEFAULTS[name]}}


def _read_plan(document: Any) -> Plan:
    if not isinstance(document, dict) or not {"schema_version", "rules"} <= document.keys():
        raise Problem("$", "is no autoprec plan: that is an object with 'schema_version' and 'rules'")
    _check_version(document["schema_version"])
    stored = document.get("sha256")
    values = read_fields(
        Plan,
        {k: v for k, v in document.items() if k not in ("schema_version", "sha256")},
        "$",
        {
            "rules": _read_rules,
            "scaler": _read_scaler,
            "recipe": plain,
            "fingerprint": plain,
            "evidence": plain,
        },
    )
    plan = _build(Plan, values, "$")
    if "sha256" in document and _digest(_document(plan)) != stored:
        raise Problem(
            "$.sha256",
            f"is {describe(stored)}, which isn't the digest of this plan: the file was changed "
            "after it was saved; restore it, or delete the sha256 line if you changed it on purpose",
        )
    return plan


def _check_version(version: Any) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise Problem("$.schema_version", f"is {describe(version)}, but must be a whole number from 1")
    if version > SCHEMA_VERSION:
        raise Problem(
            "$.schema_version",
            f"is {describe(version)}, and this autoprec reads {SCHEMA_VERSION} at most: "
            "upgrade it with `pip install -U autoprec`, or save the plan again with the older one",
        )


def _read_rules(value: Any, path: str) -> tuple[PlanRule, ...]:
    if not isinstance(value, list):
        raise Problem(path, f"is {describe(value)}, but must be a list of rules")
    return tuple(_read_rule(item, f"{path}[{index}]") for index, item in enumerate(value))


def _read_rule(value: Any, path: str) -> PlanRule:
    if not isinstance(value, dict):
        raise Problem(path, f"is {describe(value)}, but must be an object with 'match' and 'format'")
    if ("format" in value) == ("formats" in value):
        raise Problem(path, "must have either 'format', for all three roles, or 'formats', with one for each")
    if "format" in value:
        formats = Formats.all(_read_format(value["format"], f"{path}.format"))
    else:
        roles = read_fields(Formats, value["formats"], f"{path}.formats", dict.fromkeys(_ROLES, _read_format))
        formats = Formats(**roles)
    rest = {key: item for key, item in value.items() if key not in ("format", "formats")}
    values = read_fields(PlanRule, rest, path, {}, given=("formats",))
    return _build(PlanRule, {**values, "formats": formats}, path)


def _read_format(value: Any, path: str) -> str:
    if value not in RULE_FORMATS:
        raise Problem(path, f"is {describe(value)}, which is no format: use one of {', '.join(RULE_FORMATS)}")
    return value


def _read_scaler(value: Any, path: str) -> ScalerSettings:
    return _build(ScalerSettings, read_fields(ScalerSettings, value, path, {}), path)


def _build(cls: Callable[..., _T], values: dict[str, Any], path: str) -> _T:
    try:
        return cls(**values)
    except UsageError as error:
        raise Problem(path, f"is wrong: {error}") from None


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
