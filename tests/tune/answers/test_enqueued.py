import json

import pytest

from autoprec.errors import PlanFileError
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.tune.answers.enqueued import FRONT, MAX_PLANS, Enqueued, Front, load_front

BF16 = Plan(rules=(PlanRule(match=("*",), formats=Formats.all("bf16")),), target="h100", evidence={"kind": "estimated"})


def _front(count=2):
    plans = tuple(Enqueued(name=f"m{k}", plan=BF16, loss_gap=0.001 * k) for k in range(count))
    return Front(plans=plans, baseline=BF16, task="gpt", seed=3, max_loss_increase=0.01, target="h100")


def test_a_front_is_read_as_it_was_written(tmp_path):
    _front().save(tmp_path)
    assert load_front(tmp_path) == _front()
    assert load_front(tmp_path / "elsewhere") is None


def test_no_more_plans_wait_than_can_be_measured_in_minutes(tmp_path):
    _front(9).save(tmp_path)
    assert [item.name for item in load_front(tmp_path).plans] == [f"m{k}" for k in range(MAX_PLANS)]


@pytest.mark.parametrize(
    "damage", [lambda d: d.pop("seed"), lambda d: d.update(schema_version=2), lambda d: d["plans"][0].pop("plan")]
)
def test_a_damaged_file_is_named(tmp_path, damage):
    _front().save(tmp_path)
    document = json.loads((tmp_path / FRONT).read_text())
    damage(document)
    (tmp_path / FRONT).write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match=r"front\.json' can't be read"):
        load_front(tmp_path)


def test_a_plan_that_was_changed_is_refused(tmp_path):
    _front().save(tmp_path)
    text = (tmp_path / FRONT).read_text()
    (tmp_path / FRONT).write_text(text.replace('"bf16"', '"fp16"'))
    with pytest.raises(PlanFileError, match="digest"):
        load_front(tmp_path)
