"""A slice of a zoo of models: converted for bf16 and fp16, each must stay itself and as exact as the format allows.

Those written by hand run always; ``pytest -m zoo`` also runs the ones of transformers.
"""

from collections.abc import Callable

import pytest
import torch
from acceptance import accept
from slice_models import HAND_WRITTEN, TRANSFORMERS, Built

FORMATS = ("bf16", "fp16")


def _seeded(build: Callable[[], Built]) -> Callable[[], Built]:
    def fresh() -> Built:
        torch.manual_seed(0)
        return build()

    return fresh


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_model_written_by_hand_converts(name: str, format_name: str) -> None:
    accept(_seeded(HAND_WRITTEN[name]), format_name)


@pytest.mark.zoo
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.filterwarnings("default")  # of transformers itself
def test_a_model_of_transformers_converts(name: str, format_name: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'autoprec[hf]'")
    accept(_seeded(TRANSFORMERS[name]), format_name)
