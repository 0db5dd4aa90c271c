"""Recipes: how the scales of the FP8 and block formats are chosen.

A plan names the format of each GEMM role; the recipe says how numbers get there.  Recipes are autoprec's own frozen
values: a backend translates them to its library's when it runs, so that reading a plan imports no library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from autoprec.errors import UsageError


@dataclass(frozen=True, slots=True)
class Choices:
    """A tunable that takes one of these values."""

    values: tuple[Any, ...]

    def allows(self, value: object) -> bool:
        # 1 == True in Python, and a recipe that came from JSON should mean what it says.
        return any(type(value) is type(v) and value == v for v in self.values)

    def __str__(self) -> str:
        return " | ".join(map(repr, self.values))


@dataclass(frozen=True, slots=True)
class Range:
    """A number to tune between ``low`` and ``high``; by hand, any from ``minimum`` up."""

    low: float
    high: float
    minimum: float
    log: bool = False
    integer: bool = False

    def allows(self, value: object) -> bool:
        kinds = (int,) if self.integer else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.minimum <= value < float("inf")

    def __str__(self) -> str:
        return f"{'an integer' if self.integer else 'a number'} >= {self.minimum:g}"


def _choice(default: Any, *values: Any) -> Any:
    return field(default=default, metadata={"tunable": Choices(values)})


def _flag(default: bool) -> Any:
    return _choice(default, False, True)


def _number(default: float, low: float, high: float, *, minimum: float, log: bool = False) -> Any:
    integer = isinstance(default, int)
    return field(default=default, metadata={"tunable": Range(low, high, minimum, log, integer)})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes.

    ``family`` is the kind of format that a recipe scales, ``role_formats`` what each role may be in, best first.
    """

    name: ClassVar[str] = ""
    family: ClassVar[str] = ""
    role_formats: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for name, tunable in self.tunables().items():
            value = getattr(self, name)
            if not tunable.allows(value):
                raise UsageError(f"recipe {self.name!r}: {name}={value!r}; allowed: {tunable}")

    @classmethod
    def tunables(cls) -> dict[str, Choices | Range]:
        """What can be tuned, by field name; conditional on this recipe."""
        return {f.name: f.metadata["tunable"] for f in dataclasses.fields(cls)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the recipe's name under ``recipe``."""
        return {"recipe": self.name, **dataclasses.asdict(self)}


_FP8 = ("fp8_e4m3", "fp8_e5m2")
_HYBRID = {"input": _FP8, "weight": _FP8, "grad_output": ("fp8_e5m2", "fp8_e4m3")}
_E4M3_FIRST = {"input": _FP8, "weight": _FP8, "grad_output": _FP8}


@dataclass(frozen=True, kw_only=True)
class CurrentRecipe(Recipe):
    """One scale a tensor, from its own largest value.

    Args:
        power_of_two: scales rounded down to one.
        epsilon: smaller amaxes count as this.
        fast_output: the output GEMM may accumulate in less than fp32, where the hardware offers that.
        fast_grads: so may the gradients' GEMMs.
        backward: operands of the gradient GEMMs: quantised, or as they came (``high_precision``), or the forward's
            quantised ones with an unrounded ``grad_output`` (``dequantized``).
    """

    name: ClassVar[str] = "current"
    family: ClassVar[str] = "fp8"
    role_formats: ClassVar[Mapping[str, tuple[str, ...]]] = _HYBRID

    power_of_two: bool = _flag(False)
    epsilon: float = _number(0.0, 0.0, 1e-6, minimum=0.0)
    fast_output: bool = _flag(True)
    fast_grads: bool = _flag(False)
    backward: Literal["quantized", "high_precision", "dequantized"] = _choice(
        "quantized", "quantized", "high_precision", "dequantized"
    )


@dataclass(frozen=True, kw_only=True)
class DelayedRecipe(Recipe):
    """One scale a tensor, from the largest values of past steps.

    Args:
        margin: scales are made this many powers of two smaller.
        history_length: steps remembered.
        algorithm: the largest of them, or the last.
        fast_output: as in :class:`CurrentRecipe`.
        fast_grads: as in :class:`CurrentRecipe`.
    """

    name: ClassVar[str] = "delayed"
    family: ClassVar[str] = "fp8"
    role_formats: ClassVar[Mapping[str, tuple[str, ...]]] = _HYBRID

    margin: int = _number(0, 0, 3, minimum=0)
    history_length: int = _number(1024, 16, 1024, minimum=1, log=True)
    algorithm: Literal["max", "most_recent"] = _choice("max", "max", "most_recent")
    fast_output: bool = _flag(True)
    fast_grads: bool = _flag(False)


@dataclass(frozen=True, kw_only=True)
class RowwiseRecipe(Recipe):
    """One scale for each row of each operand, along the dimension that the GEMM contracts.

    Args:
        power_of_two: scales rounded down to one.
        grad_weight: ``high_precision`` leaves that GEMM's operands as they are, and scales the weight per tensor in
            the grad_input GEMM.
        fast_output: as in :class:`CurrentRecipe`.
        backward: as in :class:`CurrentRecipe`.
    """

    name: ClassVar[str] = "rowwise"
    family: ClassVar[str] = "fp8"
    role_formats: ClassVar[Mapping[str, tuple[str, ...]]] = _E4M3_FIRST

    power_of_two: bool = _flag(True)
    grad_weight: Literal["quantized", "high_precision"] = _choice("quantized", "quantized", "high_precision")
    fast_output: bool = _flag(True)
    backward: Literal["quantized", "high_precision", "dequantized"] = _choice(
        "quantized", "quantized", "high_precision", "dequantized"
    )


@dataclass(frozen=True, kw_only=True)
class Block128Recipe(Recipe):
    """One scale for each 128 values along the contracted dimension, or for each 128x128 tile.

    Args:
        power_of_two: scales rounded down to one.
        input_2d: tiles for the input.
        weight_2d: tiles for the weight, so that its transpose has the same values.
        grad_2d: tiles for grad_output.
        backward: as in :class:`CurrentRecipe`.
    """

    name: ClassVar[str] = "block128"
    family: ClassVar[str] = "fp8"
    role_formats: ClassVar[Mapping[str, tuple[str, ...]]] = _E4M3_FIRST

    power_of_two: bool = _flag(True)
    input_2d: bool = _flag(False)
    weight_2d: bool = _flag(True)
    grad_2d: bool = _flag(False)
    backward: Literal["quantized", "high_precision", "dequantized"] = _choice(
        "quantized", "quantized", "high_precision", "dequantized"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.weight_2d + self.input_2d == 2
            or self.weight_2d + self.grad_2d == 2
            or self.input_2d + self.grad_2d == 2
        ):
            raise UsageError(
                "recipe 'block128': no kernel multiplies two operands in 128x128 tiles, and each two roles meet in a "
                f"GEMM; got input_2d={self.input_2d}, weight_2d={self.weight_2d}, grad_2d={self.grad_2d}: set one"
            )


@dataclass(frozen=True, kw_only=True)
class MXFP8Recipe(Recipe):
    """A power-of-two scale for each 32 values along the contracted dimension.

    Args:
        rounding: of the scale's exponent: ``ceil`` never saturates, ``floor`` is the OCP specification's.
        weight_2d: 32x32 tiles for the weight.
        backward: as in :class:`CurrentRecipe`.
    """

    name: ClassVar[str] = "mxfp8"
    family: ClassVar[str] = "mxfp8"
    role_formats: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("input", "weight", "grad_output"), ("mxfp8",)
    )

    rounding: Literal["ceil", "floor"] = _choice("ceil", "ceil", "floor")
    weight_2d: bool = _flag(False)
    backward: Literal["quantized", "high_precision", "dequantized"] = _choice(
        "quantized", "quantized", "high_precision", "dequantized"
    )


@dataclass(frozen=True, kw_only=True)
class NVFP4Recipe(Recipe):
    """4-bit values with an e4m3 scale for each 16 along the contracted dimension.

    Args:
        weight_2d: 16x16 tiles for the weight.
        hadamard: rotate both operands of the grad_weight GEMM, which spreads outliers.
        stochastic_rounding: of grad_output.
        backward: as in :class:`CurrentRecipe`.
    """

    name: ClassVar[str] = "nvfp4"
    family: ClassVar[str] = "nvfp4"
    role_formats: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("input", "weight", "grad_output"), ("nvfp4",)
    )

    weight_2d: bool = _flag(True)
    hadamard: bool = _flag(True)
    stochastic_rounding: bool = _flag(True)
    backward: Literal["quantized", "high_precision", "dequantized"] = _choice(
        "quantized", "quantized", "high_precision", "dequantized"
    )


RECIPES: dict[str, type[Recipe]] = {
    r.name: r for r in (CurrentRecipe, DelayedRecipe, RowwiseRecipe, Block128Recipe, MXFP8Recipe, NVFP4Recipe)
}
#: What a format's numbers are scaled by where a plan says nothing; integers are scaled like fp8, per tensor.
DEFAULTS: dict[str, Recipe] = {"fp8": CurrentRecipe(), "mxfp8": MXFP8Recipe(), "nvfp4": NVFP4Recipe()}


def recipe_from_dict(data: Mapping[str, Any]) -> Recipe:
    """The recipe that :meth:`Recipe.to_dict` wrote; fields left out keep their defaults.

    Raises:
        UsageError: an unknown recipe or field, or a value that isn't allowed.
    """
    name = data.get("recipe")
    kind = RECIPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise UsageError(f"unknown recipe {name!r} under the key 'recipe'; known: {', '.join(RECIPES)}")
    settings = {key: value for key, value in data.items() if key != "recipe"}
    unknown = settings.keys() - kind.tunables().keys()
    if unknown:
        raise UsageError(f"recipe {name!r} has no field {sorted(unknown)[0]!r}; it has {', '.join(kind.tunables())}")
    return kind(**settings)


def family_of(format_name: str) -> str | None:
    """``fp8``, ``mxfp8`` or ``nvfp4``; None for formats that a recipe doesn't scale."""
    if format_name.startswith("fp8_") or format_name in ("int8", "int4"):
        return "fp8"
    return format_name if format_name in DEFAULTS else None


def recipe_for(formats: Iterable[str], settings: Mapping[str, Any]) -> Recipe | None:
    """The recipe of a GEMM.

    Args:
        formats: names of its roles' formats.
        settings: of a plan: family → what :meth:`Recipe.to_dict` wrote, e.g. ``{"fp8": {"recipe": "rowwise"}}``.

    Returns:
        None where no role needs one.

    Raises:
        UsageError: the roles need recipes of different families, or the settings hold a recipe of the wrong one.
    """
    families = sorted({family for name in formats if (family := family_of(name))})
    if not families:
        return None
    if len(families) > 1:
        raise UsageError(f"a GEMM can't mix formats of the families {' and '.join(families)}; choose one")
    family = families[0]
    recipe = recipe_from_dict(settings[family]) if family in settings else DEFAULTS[family]
    if recipe.family != family:
        raise UsageError(f"recipe {recipe.name!r} scales {recipe.family}, but stands under the key {family!r}")
    return recipe
