import pytest
import torch

from autoprec.errors import StudyError
from autoprec.tune.studies.join import CHECKPOINT, require_checkpoint, weights_digest
from autoprec.tune.studies.storage import open_storage, open_study

WEIGHTS = {"a": torch.arange(4.0).view(2, 2), "b": torch.tensor(True)}


def test_the_same_weights_have_the_same_digest():
    again = {"b": torch.tensor(True), "a": torch.arange(4.0).view(2, 2).t().contiguous().t()}
    assert weights_digest(again) == weights_digest(WEIGHTS)
    assert len(weights_digest(WEIGHTS)) == 16


@pytest.mark.parametrize(
    "other",
    [
        {**WEIGHTS, "a": torch.arange(4.0).view(4)},
        {**WEIGHTS, "a": torch.arange(4.0).view(2, 2) + 1e-6},
        {**WEIGHTS, "a": torch.arange(4.0).view(2, 2).double()},
        {"a": WEIGHTS["a"]},
        {"c": WEIGHTS["a"], "b": WEIGHTS["b"]},
        {**WEIGHTS, "a": torch.arange(4.0, dtype=torch.bfloat16).view(2, 2)},
    ],
)
def test_other_weights_have_another_digest(other):
    assert weights_digest(other) != weights_digest(WEIGHTS)


def test_another_checkpoint_is_not_trained_for_a_study_that_has_one(tmp_path):
    storage = open_storage(str(tmp_path / "s.log"), tmp_path)
    require_checkpoint(storage, "s", tmp_path, is_here=False)
    open_study("s", storage, tmp_path, {CHECKPOINT: "0123456789abcdef"})
    require_checkpoint(storage, "s", tmp_path, is_here=True)
    with pytest.raises(StudyError, match=r"from checkpoint 0123456789abcdef, which isn't in .*--output-dir"):
        require_checkpoint(storage, "s", tmp_path, is_here=False)
