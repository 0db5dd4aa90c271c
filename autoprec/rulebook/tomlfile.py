"""Read a TOML file strictly: every error names the file, the table, the key, its value and what is allowed."""

import math
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from autoprec.errors import RuleError

#: No rule file is near this; a larger one is a mistake, such as a checkpoint.
MAX_BYTES = 4 * 2**20


class Table:
    """One table of a TOML file, whose keys are taken one by one.

    Args:
        file: name of the file, for messages.
        where: name of the table, such as ``[[op]] 3``; empty at the top.
        values: the keys and their values.
    """

    def __init__(self, file: str, where: str, values: dict[str, Any]) -> None:
        self.file = file
        self.where = where
        self._values = values
        self._taken: set[str] = set()

    def error(self, message: str) -> RuleError:
        """An error that names this file and table; the caller raises it."""
        return RuleError(f"{self.file}: {self.where}: {message}" if self.where else f"{self.file}: {message}")

    def has(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        """A non-empty string; missing is an error unless there is a default."""
        value = self._take(key, default)
        if not isinstance(value, str) or (not value.strip() and value != default):
            raise self.error(f"{key} = {value!r} must be a non-empty string")
        return value

    def choice(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        """A string out of ``allowed``."""
        value = self._take(key, default)
        if value not in allowed and value != default:
            raise self.error(f"{key} = {value!r} isn't one of {', '.join(sorted(allowed))}")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """A string or a non-empty list of them."""
        value = self._take(key, default)
        items = [value] if isinstance(value, str) else value
        good = isinstance(items, list | tuple) and all(isinstance(item, str) and item.strip() for item in items)
        if not good or (not items and items != default):
            raise self.error(f"{key} = {value!r} must be a non-empty string or a list of them")
        return tuple(items)

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than ``above``."""
        value = self._take(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value <= above:
            raise self.error(f"{key} = {value!r} must be a number above {above:g}")
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.number(key, default)
        if value != int(value):
            raise self.error(f"{key} = {value!r} must be a whole number of at least 1")
        return int(value)

    def table(self, key: str) -> "Table":
        """A nested table; empty if it's missing."""
        value = self._take(key, {})
        if not isinstance(value, dict):
            raise self.error(f"{key} = {value!r} must be a table")
        return Table(self.file, f"{self.where} {key}".strip(), value)

    def tables(self, key: str) -> "list[Table]":
        """An array of tables; empty if it's missing."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(f"{key} = {value!r} must be tables, each under [[{key}]]")
        prefix = f"{self.where} " if self.where else ""
        return [Table(self.file, f"{prefix}[[{key}]] {i}", item) for i, item in enumerate(value, 1)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def done(self) -> None:
        """Raise for every key that nobody took."""
        unknown = sorted(set(self._values) - self._taken)
        if unknown:
            allowed = ", ".join(sorted(self._taken))
            raise self.error(f"unknown key {', '.join(map(repr, unknown))}; allowed: {allowed}")

    def _take(self, key: str, default: Any) -> Any:
        self._taken.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def read_toml(path: Path) -> Table:
    """The top table of a TOML file.

    Raises:
        RuleError: it can't be read, is larger than :data:`MAX_BYTES`, or isn't TOML.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RuleError(f"{path}: {path.stat().st_size} bytes are too many for a rule file (at most {MAX_BYTES})")
        text = path.read_text("utf-8")
    except OSError as error:
        raise RuleError(f"{path}: can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RuleError(f"{path}: isn't UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        return Table(path.name, "", tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise RuleError(f"{path}: isn't TOML: {error}") from error
