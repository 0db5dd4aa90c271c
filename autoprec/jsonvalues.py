"""JSON from outside: parsed strictly, then read into the fields of a dataclass with the place of any mistake."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

Reader = Callable[[Any, str], Any]

#: Deeper nesting is refused, so that no later walk over the value meets Python's recursion limit.
MAX_DEPTH = 64


class Problem(ValueError):  # noqa: N818  (a place and a sentence, which the caller makes an error of)
    """What is wrong, and where: ``$.rules[3].format``."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path} {text}")


def parse(data: bytes | str) -> Any:
    """The value of a JSON text in UTF-8.  Repeated keys, NaN, infinities and numbers beyond a float are refused.

    Raises:
        Problem: the text isn't such JSON.
    """
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise Problem("$", f"is no JSON: byte {error.start} isn't UTF-8 (a binary file, or a damaged one)") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise Problem("$", f"is no JSON: {error.msg} at {place} (truncated or damaged?)") from None
    except RecursionError:
        raise Problem("$", f"is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        if isinstance(error, Problem):
            raise
        # the interpreter's limit on the digits of an integer
        raise Problem("$", f"has a number that is too long: {error}") from None
    return plain(value, "$")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise Problem("$", f"has the key {describe(repeated)} twice in one object: keep one of them")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise Problem("$", f"has {name}, which is no number in JSON: use a finite one, or null")


def plain(value: Any, path: str, depth: int = 0) -> Any:
    """A copy made of dict, list, str, int, float, bool and None; tuples become lists.

    Raises:
        Problem: a value has no place in JSON, or is not finite.
    """
    if depth > MAX_DEPTH:
        raise Problem(path, f"is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        for key in value:
            _check_key(key, path)
        return {str(key): plain(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    return _plain_scalar(value, path)


def _check_key(key: Any, path: str) -> None:
    if not isinstance(key, str):
        raise Problem(path, f"has the key {describe(key)}, but keys must be strings")
    _plain_scalar(key, path)


def _plain_scalar(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise Problem(path, f"is {describe(value)}, which has half a surrogate pair and can't be written as UTF-8")
        return str(value)
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    raise Problem(path, f"is {describe(value)}, but must be a finite number, string, bool, null, list or object")


def read_fields(
    cls: type, value: Any, path: str, readers: Mapping[str, Reader], given: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The arguments of a dataclass from a JSON object; a field that has a default may be missing.

    Args:
        cls: the dataclass.
        value: what should be an object.
        path: its place, for messages.
        readers: how to read a field whose type :func:`read` doesn't know.
        given: fields that don't come from the object.

    Raises:
        Problem: an unknown or missing key, or a value of the wrong type.
    """
    if not isinstance(value, dict):
        raise Problem(path, f"is {describe(value)}, but must be an object")
    known = {f.name: f for f in fields(cls) if f.name not in given}
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise Problem(path, f"has the unknown key {describe(key)}: {hint}")
    for name, f in known.items():
        if name not in value and f.default is MISSING and f.default_factory is MISSING:
            raise Problem(path, f"lacks {name!r}")
    types = _types(cls)
    return {
        name: readers[name](item, f"{path}.{name}") if name in readers else read(types[name], item, f"{path}.{name}")
        for name, item in value.items()
    }


@cache
def _types(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def read(kind: Any, value: Any, path: str) -> Any:
    """A JSON value as the type of a dataclass's field: str, bool, int, float, a Literal or a tuple of these."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind) or not isinstance(value, str):
            raise Problem(path, f"is {describe(value)}, but must be one of {', '.join(get_args(kind))}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise Problem(path, f"is {describe(value)}, but must be a list")
        return tuple(read(get_args(kind)[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {str: "a string", bool: "true or false", int: "a whole number", float: "a number", dict: "an object"}
        raise Problem(path, f"is {describe(value)}, but must be {names[kind]}")
    return value


def describe(value: Any) -> str:
    """A value in a message: its JSON form, cut short, or its type."""
    if isinstance(value, dict | list | tuple):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    if value is None or isinstance(value, str | bool | int | float):
        text = json.dumps(value)
        return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
    return f"a {type(value).__name__}"
