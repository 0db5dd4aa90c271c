"""Example inputs in the four forms a user may give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autoprec.errors import UsageError

#: Calls the model on all example batches; what it returns is ignored.
Run = Callable[[nn.Module], Any]


def as_run(example_inputs: Any) -> Run:
    """A function that calls a model on the example inputs.

    Args:
        example_inputs: a tensor, a tuple (positional arguments), a dict (keyword arguments), or a callable
            ``run(model)`` that may make many calls.

    Raises:
        UsageError: any other type.
    """
    if isinstance(example_inputs, torch.Tensor):
        return lambda model: model(example_inputs)
    if isinstance(example_inputs, tuple):
        return lambda model: model(*example_inputs)
    if isinstance(example_inputs, Mapping):
        return lambda model: model(**example_inputs)
    if callable(example_inputs) and not isinstance(example_inputs, nn.Module):
        return example_inputs
    raise UsageError(
        f"example_inputs is a {type(example_inputs).__name__}; give a tensor, a tuple of positional arguments, a dict "
        "of keyword arguments, or a callable run(model)"
    )
