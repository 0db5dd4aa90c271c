"""Activations of a transformer by its sizes alone, where there are no example inputs."""

from __future__ import annotations

from autoprec.estimate.estimate import Estimate

#: Bytes a layer keeps for its backward for each token and unit of width, 16-bit activations and attention that doesn't
#: store its scores: equation 2 of https://arxiv.org/abs/2205.05198 (2022) without its last term.
BYTES_A_LAYER = 34

ASSUMPTIONS = (
    "a GPT's layer (feed-forward of 4 widths, dropout), 16-bit activations, attention that doesn't store its scores",
    "no activation checkpointing; the loss keeps its fp32 logits and their gradient",
)


def transformer_activations(*, width: int, layers: int, vocabulary: int, batch: int, length: int) -> Estimate:
    """Bytes of activations at the end of a forward.

    Args:
        width: of the hidden state.
        layers: number of them.
        vocabulary: width of the logits.
        batch: sequences a step.
        length: tokens of each.
    """
    tokens = float(batch * length)
    parts = {"layers": BYTES_A_LAYER * tokens * width * layers, "logits": 8 * tokens * vocabulary}
    return Estimate(value=sum(parts.values()), unit="bytes", parts=parts, assumptions=ASSUMPTIONS)
