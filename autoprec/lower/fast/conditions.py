"""When a captured graph must not stand in for the forward: somebody else watches, traces or changed the model."""

from __future__ import annotations

from itertools import repeat

import torch
from torch import nn
from torch._C import _autograd, _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as fx_trace
from torch.nn.modules import module as torch_module

from autoprec.frames.swap import STATE

#: Attributes of one module that hold hooks.  Dynamo compiles them in or out once and doesn't look again.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def somebody_else_runs() -> bool:
    """Whether this thread is inside a tracer, a user's mode, a functional transform or a recomputation."""
    return (
        torch._C._get_tracing_state() is not None  # torch.jit.trace
        or fx_trace._is_fx_tracing_flag
        or torch._C._len_torch_dispatch_stack() > 0  # fake tensors and make_fx among them
        or _has_function_mode()
        or _functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        # Checkpointing and offloading count what a forward saves.
        or _autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._current_graph_task_id() != -1  # inside a backward: a recomputation
        or eval_frame.get_eval_frame_callback() is not None  # after a break in the user's own graph
    )


def _has_function_mode() -> bool:
    """A mode of the user's; ``set_default_device`` leaves one on the stack for good, which doesn't count."""
    for i in range(torch._C._len_torch_function_stack()):
        if type(torch._C._get_function_stack_at(i)).__name__ != "DeviceContext":
            return True
    return False


def why_unavailable() -> str | None:
    """What this version of torch lacks of what :func:`somebody_else_runs` asks, or None."""
    try:
        somebody_else_runs()
        for name in _GLOBAL_HOOKS:
            getattr(torch_module, name)
    except AttributeError as error:
        return f"torch {torch.__version__}: {error}"
    return None


class ModelWatch:
    """Tells cheaply, at each call, whether a model is still as it was captured where Dynamo doesn't look.

    Holds the attributes of the submodules but nothing of the root, so that no reference cycle keeps a model alive.
    """

    def __init__(self, root: nn.Module) -> None:
        below = [module for module in root.modules() if module is not root]
        self._root_state, self._root_names = vars(root).get(STATE), frozenset(vars(root))
        self._root_size = len(self._root_names)
        self._attributes = [vars(module) for module in below]
        self._classes = [type(module) for module in below]
        self._names = [frozenset(attributes) for attributes in self._attributes]
        self._states = [attributes.get(STATE) for attributes in self._attributes]
        self._sizes = list(map(len, self._names))
        hooks = [attributes.get(name) for attributes in self._attributes for name in _HOOKS]
        self._hooks = (*(h for h in hooks if h is not None), *(getattr(torch_module, name) for name in _GLOBAL_HOOKS))
        self._first = self._first_objection()

    def _first_objection(self) -> str | None:
        if any("forward" in names or "_compiled_call_impl" in names for names in self._names):
            return "a submodule is compiled or has a forward of its own"
        return None

    def objection(self, root: nn.Module) -> str | None:
        """Why the graph may not run now; None if nothing is in the way."""
        attributes = vars(root)
        if attributes.get(STATE) is not self._root_state:
            return "other frames were put in"
        # A class on top of ours (fully_shard, a parametrization) or FSDP's flat parameters: guards don't see those.
        if "_autoprec_original" not in vars(type(root)) or "_is_fsdp_managed_module" in attributes:
            return "another wrapper manages its parameters"
        if any(self._hooks):
            return "a submodule has hooks"
        if list(map(dict.get, self._attributes, repeat(STATE))) != self._states:
            return "a submodule was converted or reverted by itself"
        # Only a module that got or lost an attribute is looked into; this runs at every call.
        if len(attributes) != self._root_size or list(map(len, self._attributes)) != self._sizes:
            shadowed = self._shadowed(root)
            if shadowed is not None:
                return f"{shadowed!r} was replaced on a module"
            self._root_size, self._sizes = len(attributes), list(map(len, self._attributes))
        return self._first

    def _shadowed(self, root: nn.Module) -> str | None:
        """A name that an instance got since and that hides one of its class."""
        # The root's own forward and compiled call are outside the graph.
        names = vars(root).keys() - self._root_names - {"forward", "_compiled_call_impl"}
        pairs = [(type(root), names)]
        pairs += [(c, a.keys() - n) for c, a, n in zip(self._classes, self._attributes, self._names, strict=True)]
        return next((name for cls, names in pairs for name in sorted(names) if hasattr(cls, name)), None)
