"""Stages for a zoo harness that offers ``stage(name)`` and a ``Ctx`` whose ``fresh()`` makes the model and its inputs.

PYTHONPATH=tests/zoo python zoo.py run --plugin stage --stages eager,autoprec_bf16,autoprec_fp16
"""

from typing import Any

from acceptance import accept
from zoo import stage


@stage("autoprec_bf16")
def autoprec_bf16(context: Any) -> dict[str, float]:
    """Converted for bf16: forward, backward, revert."""
    return accept(context.fresh, "bf16")


@stage("autoprec_fp16")
def autoprec_fp16(context: Any) -> dict[str, float]:
    """Converted for fp16: the same, with a loss scale."""
    return accept(context.fresh, "fp16")
