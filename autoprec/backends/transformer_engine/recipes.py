"""Our recipes as Transformer Engine's, and which of them it can't follow.

Its recipes read environment variables when their module is imported; every field that changes a number is given here,
so that none of them does.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from autoprec.backends.base import Gemm
from autoprec.plan import Formats
from autoprec.recipes import Block128Recipe, CurrentRecipe, DelayedRecipe, MXFP8Recipe, NVFP4Recipe, Recipe

#: Recipe → Transformer Engine's class for it.
CLASSES: dict[type[Recipe], str] = {
    CurrentRecipe: "Float8CurrentScaling",
    DelayedRecipe: "DelayedScaling",
    Block128Recipe: "Float8BlockScaling",
    MXFP8Recipe: "MXFP8BlockScaling",
    NVFP4Recipe: "NVFP4BlockScaling",
}
#: Where it says whether a recipe runs on this machine; it never tells by entering one, which leaves its state changed.
SUPPORT = {
    CurrentRecipe: "is_fp8_available",
    DelayedRecipe: "is_fp8_available",
    Block128Recipe: "is_fp8_block_scaling_available",
    MXFP8Recipe: "is_mxfp8_available",
    NVFP4Recipe: "is_nvfp4_available",
}


def te_recipe(recipe: Recipe, formats: Formats) -> Any:
    """Transformer Engine's recipe for ours; a new object each time, since a changed one is not noticed by its layers.

    Args:
        recipe: one that :func:`refuse_recipe` has nothing against.
        formats: E4M3 forward; E5M2 gradients make it Transformer Engine's HYBRID.
    """
    common = importlib.import_module("transformer_engine.common.recipe")
    kind = getattr(common, CLASSES[type(recipe)])
    accepted = _fields(type(recipe))
    made = kind(**{name: value for name, value in _settings(recipe, formats, common).items() if name in accepted})
    if isinstance(recipe, CurrentRecipe | Block128Recipe):
        # te.Linear reads these, whatever use_power_2_scales says; they are no fields, but attributes of the class.
        epsilon = recipe.epsilon if isinstance(recipe, CurrentRecipe) else 0.0
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            setattr(made, name, common.QParams(power_2_scale=recipe.power_of_two, amax_epsilon=epsilon))
    return made


def refuse_recipe(gemm: Gemm) -> str:
    """Why Transformer Engine can't follow the recipe in these formats; empty if it can."""
    recipe = gemm.recipe
    if recipe is None or type(recipe) not in CLASSES:
        names = ", ".join(repr(kind.name) for kind in CLASSES)
        return f"takes the recipes {names}, not {recipe.name if recipe else None!r}"
    if isinstance(recipe, DelayedRecipe):
        if not recipe.fast_output or recipe.fast_grads:
            return "recipe 'delayed' accumulates fast in the output GEMM alone; set fast_output=True, fast_grads=False"
        if gemm.mode == "inference":
            return "recipe 'delayed' learns its scales in training steps; use 'current' for inference"
    if isinstance(recipe, MXFP8Recipe) and recipe.rounding != "ceil":
        return f"recipe 'mxfp8' has scales with rounding='ceil', not {recipe.rounding!r}"
    if isinstance(recipe, NVFP4Recipe) and recipe.hadamard and str(gemm.dtype) != "torch.bfloat16":
        return f"recipe 'nvfp4' rotates bf16 activations alone, not {gemm.dtype}; cast them, or set hadamard=False"
    return _refuse_formats(gemm, recipe) or _refuse_fields(recipe)


def _refuse_formats(gemm: Gemm, recipe: Recipe) -> str:
    forward, gradient = {
        "fp8": ("fp8_e4m3", ("fp8_e4m3", "fp8_e5m2")),
        "mxfp8": ("mxfp8", ("mxfp8",)),
        "nvfp4": ("nvfp4", ("nvfp4",)),
    }[recipe.family]
    for role in ("input", "weight"):
        if getattr(gemm.formats, role) != forward:
            return f"recipe {recipe.name!r} has {forward} in the forward, not {getattr(gemm.formats, role)} as {role}"
    quantized = gemm.mode == "training" and getattr(recipe, "backward", "quantized") == "quantized"
    if quantized and gemm.formats.grad_output not in gradient:
        return f"recipe {recipe.name!r} has gradients in {' or '.join(gradient)}, not {gemm.formats.grad_output}"
    return ""


def _refuse_fields(recipe: Recipe) -> str:
    """Settings that came with a later version."""
    accepted = _fields(type(recipe))
    backward = getattr(recipe, "backward", "quantized")
    if backward != "quantized" and "backward_override" not in accepted:
        return f"{backward=} needs Transformer Engine 2.15 or newer"
    if isinstance(recipe, MXFP8Recipe) and recipe.weight_2d and "enable_2d_quantization" not in accepted:
        return "weight_2d=True of recipe 'mxfp8' needs a newer Transformer Engine"
    return ""


def _fields(kind: type[Recipe]) -> set[str]:
    common = importlib.import_module("transformer_engine.common.recipe")
    return {field.name for field in dataclasses.fields(getattr(common, CLASSES[kind]))}


def _settings(recipe: Recipe, formats: Formats, common: Any) -> dict[str, Any]:
    """Arguments of the recipe's class; those that an older version lacks are at what it does."""
    backward = getattr(recipe, "backward", "quantized")
    hybrid = formats.grad_output == "fp8_e5m2"
    settings: dict[str, Any] = {
        "fp8_format": common.Format.HYBRID if hybrid else common.Format.E4M3,
        "backward_override": None if backward == "quantized" else backward,
        "fp8_dpa": False,
        "fp8_mha": False,
    }
    if isinstance(recipe, CurrentRecipe):
        output, grads = (common.MMParams(use_split_accumulator=not f) for f in (recipe.fast_output, recipe.fast_grads))
        settings |= {"use_power_2_scales": recipe.power_of_two}
        settings |= {"fp8_gemm_fprop": output, "fp8_gemm_dgrad": grads, "fp8_gemm_wgrad": grads}
    elif isinstance(recipe, DelayedRecipe):
        # Every process scales its own part of the batch; a layer that one of them skips would hang a reduction.
        settings |= {"margin": recipe.margin, "amax_history_len": recipe.history_length}
        settings |= {"amax_compute_algo": recipe.algorithm, "reduce_amax": False}
    elif isinstance(recipe, Block128Recipe):
        settings |= {"use_f32_scales": not recipe.power_of_two}
        for name in ("input_2d", "weight_2d", "grad_2d"):
            field = {"input_2d": "x", "weight_2d": "w", "grad_2d": "grad"}[name]
            settings[f"{field}_block_scaling_dim"] = 2 if getattr(recipe, name) else 1
    elif isinstance(recipe, MXFP8Recipe):
        settings |= {"enable_2d_quantization": recipe.weight_2d}
    elif isinstance(recipe, NVFP4Recipe):
        settings |= {"disable_rht": not recipe.hadamard, "disable_2d_quantization": not recipe.weight_2d}
        settings |= {"disable_stochastic_rounding": not recipe.stochastic_rounding}
        settings |= {"row_scaled_activation": False, "nvfp4_4over6": "none"}
    return settings
