"""The JSON Schema of plan files, for editors and other tools.

``python -m autoprec.planschema`` prints it; ``autoprec/plan.schema.json`` is its output.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from autoprec.plan import RULE_FORMATS, SCHEMA_VERSION, Formats, Plan, PlanRule, ScalerSettings

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number"}
_RANGES = {
    "growth_factor": {"exclusiveMinimum": 1},
    "backoff_factor": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "growth_interval": {"minimum": 1},
    "init_scale": {"exclusiveMinimum": 0},
    "min_scale": {"exclusiveMinimum": 0},
    "max_scale": {"exclusiveMinimum": 0},
}


def plan_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a plan file."""
    plan = _object(Plan, {"rules": {"type": "array", "items": _rule()}, "scaler": _object(ScalerSettings, _scaler())})
    plan["properties"] |= {
        "schema_version": {"type": "integer", "minimum": 1, "maximum": SCHEMA_VERSION},
        "sha256": {
            "type": "string",
            "pattern": "^[0-9a-f]{64}$",
            "description": "left out of a file edited by hand",
        },
    }
    plan["required"].append("schema_version")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "autoprec plan"}
    return {**head, "$defs": {"format": {"enum": list(RULE_FORMATS)}}, **plan}


def _rule() -> dict[str, Any]:
    one = {"$ref": "#/$defs/format"}
    match = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
    rule = _object(PlanRule, {"match": match})
    del rule["properties"]["formats"]
    rule["required"].remove("formats")
    rule["properties"] |= {"format": one, "formats": _object(Formats, {f.name: one for f in fields(Formats)})}
    return {**rule, "oneOf": [{"required": ["format"]}, {"required": ["formats"]}]}


def _scaler() -> dict[str, Any]:
    types = get_type_hints(ScalerSettings)
    return {name: {**_type(types[name]), **limits} for name, limits in _RANGES.items()}


def _object(cls: type, special: dict[str, Any]) -> dict[str, Any]:
    types = get_type_hints(cls)
    return {
        "type": "object",
        "properties": {f.name: special.get(f.name) or _type(types[f.name]) for f in fields(cls)},
        "required": [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING],
        "additionalProperties": False,
    }


def _type(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _type(get_args(kind)[0])}
    return {"type": _NAMES.get(kind, "object")}


if __name__ == "__main__":
    print(json.dumps(plan_schema(), indent=2))
