"""The spellings of an op.

Ops are told apart by ``func.__name__``, never by the function object: Dynamo can't guard on dicts keyed by Python-level
methods, and some libraries replace functions of torch.
"""

from collections.abc import Iterator

from autoprec.rulebook.opnames import FOLDED

__all__ = ["is_inplace", "spellings"]


def is_inplace(name: str) -> bool:
    """Whether a spelling writes its first argument."""
    if name.startswith("__i") and name.endswith("__") and name in FOLDED:
        return True
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def spellings(op: str) -> Iterator[str]:
    """Every spelling that folds to ``op``, the in-place ones included."""
    yield op
    yield f"{op}_"
    for spelling, name in FOLDED.items():
        if name == op and spelling != op:
            yield spelling
            if not spelling.startswith("__"):
                yield f"{spelling}_"
