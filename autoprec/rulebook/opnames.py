"""The name of an op, and which names torch has.

Rules name an op as it is called; the table below folds operators, in-place spellings and synonyms into one name.
"""

from functools import cache

#: Binary operators: ``__matmul__``, ``__rmatmul__`` and ``__imatmul__`` are all ``matmul``.
_OPERATORS = {
    "matmul": "matmul",
    "pow": "pow",
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "div",
    "div": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
}

_UNARY = {"__neg__": "neg", "__abs__": "abs", "__setitem__": "index_put", "__getitem__": "index"}

#: Two names of one computation.
_SYNONYMS = {
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "inverse": "linalg_inv",
    "linalg_matmul": "matmul",
    "multiply": "mul",
    "negative": "neg",
    "rsub": "sub",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "special_log_softmax": "log_softmax",
    "special_logsumexp": "logsumexp",
    "special_softmax": "softmax",
    "subtract": "sub",
    "true_divide": "div",
}

#: Folded name of every spelling that isn't its own.
FOLDED = {f"__{side}{name}__": op for name, op in _OPERATORS.items() for side in ("", "r", "i")} | _UNARY | _SYNONYMS


def canonical_op(name: str) -> str:
    """The one name of an op: ``masked_fill`` for ``masked_fill_``, ``matmul`` for ``__rmatmul__``."""
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") and len(name) > 1 else name
    return FOLDED.get(plain, plain)


@cache
def known_ops() -> frozenset[str]:
    """Canonical names of everything that torch lets a function mode see."""
    from torch.overrides import get_ignored_functions, get_overridable_functions

    functions = [f for group in get_overridable_functions().values() for f in group]
    # factories can't be overridden by a tensor subclass, but a mode sees them
    functions += get_ignored_functions()
    return frozenset(canonical_op(name) for f in functions if (name := getattr(f, "__name__", "")))
