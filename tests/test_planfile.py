"""Plan files: what is written is read back; anything else gets one clear error."""

import json
import os
import pickle
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoprec import load_plan, planfile
from autoprec.errors import PlanFileError
from autoprec.plan import FOLLOW, Formats, Plan, PlanRule, ScalerSettings
from autoprec.plandiff import PlanDiff
from autoprec.planschema import plan_schema

FP8 = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
PLAN = Plan(
    rules=(
        PlanRule(match=("head", "*.lm_head"), formats=Formats.all("bf16"), reason="logits — keep", source="family"),
        PlanRule(match=("blocks.*.mlp.*",), formats=FP8, backend=("transformer_engine", "torchao"), source="search"),
        PlanRule(match=("*::softmax",), formats=Formats.all("fp32")),
    ),
    target="h100",
    recipe={"fp8": {"amax_history": 16, "margin": 0.5, "scaling": ["tensorwise", None, True]}},
    scaler=ScalerSettings(enabled=True, init_scale=1024.0),
    fingerprint={"hash": "0123456789abcdef"},
    evidence={"speed": [1.5, 1.4, 1.6], "device": "H100"},
)
TEXT = json.dumps(PLAN.to_json(), indent=2, sort_keys=True, ensure_ascii=False)


def edited(*path: Any, to: Any = None, drop: bool = False, keep_sha: bool = False) -> str:
    """The plan's text with one value set or dropped."""
    document = PLAN.to_json()
    if not keep_sha:
        del document["sha256"]
    place = document
    for step in path[:-1]:
        place = place[step]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(document)


def test_a_saved_plan_is_read_back_equal(tmp_path: Path):
    PLAN.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == PLAN
    assert loaded.sha256 == PLAN.sha256
    assert Plan.from_json(PLAN.to_json()) == Plan.from_json(TEXT) == PLAN


def test_the_file_is_made_for_diffs(tmp_path: Path):
    PLAN.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text(encoding="utf-8")
    assert text == TEXT + "\n"
    document = json.loads(text)
    assert document["schema_version"] == 1
    assert document["rules"][0]["format"] == "bf16"
    assert document["rules"][1]["formats"] == {"input": "fp8_e4m3", "weight": "fp8_e4m3", "grad_output": "fp8_e5m2"}
    assert "format" not in document["rules"][1]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
formats = st.sampled_from(["fp32", "bf16", "fp16", "fp8_e4m3", "nvfp4", FOLLOW])
rules = st.builds(
    PlanRule,
    match=st.lists(names.filter(bool), min_size=1, max_size=3).map(tuple),
    formats=st.builds(Formats, input=formats, weight=formats, grad_output=formats),
    backend=st.lists(names, max_size=2).map(tuple),
    reason=names,
    source=names,
)
plans = st.builds(
    Plan,
    rules=st.lists(rules, max_size=4).map(tuple),
    target=names,
    mode=st.sampled_from(["training", "inference"]),
    level=st.sampled_from(["O0", "O1", "O2", "O3"]),
    recipe=st.dictionaries(names, json_values, max_size=3),
    scaler=st.builds(ScalerSettings, enabled=st.booleans(), init_scale=st.floats(1.0, 2.0**24)),
    merge_casts=st.booleans(),
    evidence=st.dictionaries(names, json_values, max_size=3),
)


@given(plan=plans)
@settings(max_examples=100, derandomize=True, deadline=None)
def test_any_plan_survives_its_json(plan: Plan):
    text = json.dumps(plan.to_json())
    again = Plan.from_json(text)
    assert again == plan
    assert again.sha256 == plan.sha256 == json.loads(text)["sha256"]


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    data = bytearray(TEXT.encode())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        piece = draw(st.binary(max_size=4) | st.sampled_from([b"NaN", b"1e999", b'"', b"{", b"[" * 2000, b"9" * 5000]))
        data[at : at + draw(st.integers(0, 40))] = piece
        if not data:
            return b""
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@given(data=mutations())
@settings(
    max_examples=400, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_damaged_file_is_refused_or_still_the_same_plan(tmp_path: Path, data: bytes):
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    try:
        loaded = load_plan(path)
    except PlanFileError as error:
        said = str(error)
    else:
        assert loaded == PLAN
        return
    assert str(path) in said
    assert len(said) < 2000


@given(value=json_values, where=st.integers(0))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_any_json_in_any_place_is_a_plan_or_a_plan_file_error(value: Any, where: int):
    places = [("rules",), ("rules", 0), ("rules", 0, "match"), ("rules", 0, "format"), ("rules", 1, "formats"),
              ("rules", 1, "formats", "input"), ("rules", 1, "backend"), ("target",), ("mode",), ("merge_casts",),
              ("scaler",), ("scaler", "growth_interval"), ("scaler", "init_scale"), ("schema_version",), ("recipe",),
              ("fingerprint",), ("evidence",)]  # fmt: skip
    text = edited(*places[where % len(places)], to=value)
    try:
        plan = Plan.from_json(text)
    except PlanFileError:
        return
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            edited("rules", 0, "format", to="float16"),
            r'\$\.rules\[0\]\.format is "float16", which is no format: use one',
        ),
        (edited("rules", 1, "formats", "weight", to=8), r"\$\.rules\[1\]\.formats\.weight is 8, which is no format"),
        (edited("rules", 1, "formats", "weight", drop=True), r"\$\.rules\[1\]\.formats lacks 'weight'"),
        (edited("rules", 1, "format", to="bf16"), r"\$\.rules\[1\] must have either 'format'.* or 'formats'"),
        (edited("rules", 0, "match", to="head"), r'\$\.rules\[0\]\.match is "head", but must be a list'),
        (edited("rules", 0, "match", to=[]), r"\$\.rules\[0\] is wrong: match=\(\) must be a tuple of globs"),
        (edited("rules", 0, "match", 0, to=None), r"\$\.rules\[0\]\.match\[0\] is null, but must be a string"),
        (edited("rules", 0, "raeson", to=""), r"\$\.rules\[0\] has the unknown key \"raeson\": did you mean 'reason'"),
        (edited("rules", to={}), r"\$\.rules is an object of 0, but must be a list of rules"),
        (edited("rules", drop=True), r"is no autoprec plan: that is an object with 'schema_version' and 'rules'"),
        ("[]", "is no autoprec plan"),
        ('{"architectures": ["GPT2LMHeadModel"]}', "is no autoprec plan"),
        (
            edited("schema_version", to=2),
            r"schema_version is 2, and this autoprec reads 1 at most: upgrade it with `pip",
        ),
        (edited("schema_version", to="1"), r'schema_version is "1", but must be a whole number'),
        (edited("mode", to="train"), r'\$\.mode is "train", but must be one of training, inference'),
        (edited("merge_casts", to=1), r"\$\.merge_casts is 1, but must be true or false"),
        (
            edited("scaler", "growth_interval", to=2.5),
            r"\$\.scaler\.growth_interval is 2.5, but must be a whole number",
        ),
        (
            edited("scaler", "growth_interval", to=True),
            r"\$\.scaler\.growth_interval is true, but must be a whole number",
        ),
        (edited("scaler", "backoff_factor", to=2), r"\$\.scaler is wrong: scaler backoff_factor=2.0 must be between 0"),
        (edited("evidence", "loss", to=float("nan")), "has NaN, which is no number in JSON"),
        (edited("evidence", "loss", to=1).replace('"loss": 1', '"loss": -1e999'), r"\$\.evidence\.loss is -Infinity"),
        (edited("evidence", "loss", to=10**30), r"\$\.evidence\.loss is 10+, but must be a finite number"),
        (edited("evidence", "text", to="\ud800"), r"\$\.evidence\.text .* half a surrogate pair"),
        (
            edited("target", to="b100", keep_sha=True),
            r"\$\.sha256 .* was changed after it was saved.*delete the sha256",
        ),
        (edited("sha256", to=7), r"\$\.sha256 is 7, which isn't the digest"),
        (TEXT.replace('"mode"', '"mode": "training", "mode"'), 'has the key "mode" twice in one object'),
        (TEXT[:200], r"is no JSON: .* at line \d+, column \d+ \(truncated or damaged\?\)"),
        ("", "is no JSON"),
        ("9" * 5000, "has a number that is too long"),
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested more than 64 deep"),
    ],
)
def test_each_mistake_is_named_with_its_place(tmp_path: Path, text: str, message: str):
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(PlanFileError, match=message) as caught:
        load_plan(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_binary_file_is_refused_and_never_unpickled(tmp_path: Path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    (tmp_path / "plan.json").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(PlanFileError, match="isn't UTF-8"):
        load_plan(tmp_path / "plan.json")
    assert not (tmp_path / "exploded").exists()


def test_a_huge_file_is_refused_unread(tmp_path: Path):
    with (tmp_path / "plan.json").open("wb") as file:
        file.truncate(2**40)  # sparse: a reader of all of it would need a TiB
    with pytest.raises(PlanFileError, match="over 64 MiB"):
        load_plan(tmp_path / "plan.json")


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path):
    for path in (tmp_path / "no.json", tmp_path, "no\0.json"):
        with pytest.raises(PlanFileError, match="isn't a file"):
            load_plan(path)


def test_a_byte_order_mark_and_other_layouts_are_read(tmp_path: Path):
    document = PLAN.to_json()
    document["scaler"]["init_scale"] = 1024  # as JavaScript writes 1024.0
    (tmp_path / "plan.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(document, separators=(",", ":")).encode())
    assert load_plan(tmp_path / "plan.json") == PLAN


def test_a_plan_by_hand_needs_only_its_rules():
    plan = Plan.from_json('{"schema_version": 1, "rules": [{"match": ["*"], "format": "bf16"}]}')
    assert plan == Plan(rules=(PlanRule(match=("*",), formats=Formats.all("bf16")),))


@pytest.mark.parametrize("value", [float("nan"), object(), {1: 2}, 2**70, "\udc80"])
def test_a_plan_without_a_json_form_is_not_written(tmp_path: Path, value: Any):
    PLAN.save(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match=r"no JSON form: \$\.evidence"):
        replace(PLAN, evidence={"loss": value}).save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == PLAN


def test_saving_replaces_the_file_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o640)

    def crash(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(PlanFileError, match="can't be written: No space left on device"):
        PLAN.save(path)
    assert path.read_text() == "old"
    monkeypatch.undo()
    PLAN.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_is_written_through_and_a_missing_folder_named(tmp_path: Path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    PLAN.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load_plan(tmp_path / "real.json") == PLAN
    with pytest.raises(PlanFileError, match=r"no/plan.json' can't be written: No such file"):
        PLAN.save(tmp_path / "no" / "plan.json")


def test_the_shipped_schema_is_the_generated_one():
    shipped = Path(planfile.__file__).with_name("plan.schema.json").read_text()
    assert json.loads(shipped) == plan_schema(), "python -m autoprec.planschema > autoprec/plan.schema.json"


def test_the_schema_knows_every_key_that_a_plan_writes():
    schema, document = plan_schema(), PLAN.to_json()
    assert document.keys() == schema["properties"].keys()
    assert document["scaler"].keys() == schema["properties"]["scaler"]["properties"].keys()
    known = schema["properties"]["rules"]["items"]["properties"].keys()
    assert known == {"match", "format", "formats", "backend", "reason", "source"}
    assert all(rule.keys() <= known for rule in document["rules"])


def test_diff_of_equal_plans_is_false():
    other = replace(PLAN, evidence={}, rules=tuple(replace(r, reason="other") for r in PLAN.rules))
    assert not PLAN.diff(other)
    assert PLAN.diff(other) == PlanDiff()
    assert str(PLAN.diff(other)) == "no difference"
    with_evidence = PLAN.diff(other, evidence=True)
    assert {c.name for c in with_evidence.settings} == {"evidence.speed", "evidence.device"}
    assert len(with_evidence.rules) == 4


def test_diff_reads_glob_by_glob():
    head, mlp, softmax = PLAN.rules
    other = replace(
        PLAN,
        rules=(
            softmax,
            replace(head, match=("head",), formats=Formats.all("fp32")),
            mlp,
            replace(head, match=("new",)),
        ),
        target="a100",
        scaler=replace(PLAN.scaler, init_scale=2048.0),
        recipe={},
        fingerprint={"hash": "fedcba9876543210"},
    )
    assert str(PLAN.diff(other)).splitlines() == [
        "~ head: bf16 (logits — keep) -> fp32 (logits — keep)",
        "- *.lm_head: bf16 (logits — keep)",
        "+ new: bf16 (logits — keep)",
        "~ *::softmax: moved among the rules",
        '~ target: "h100" -> "a100"',
        "~ scaler.init_scale: 1024.0 -> 2048.0",
        "~ recipe.fp8.amax_history: 16 -> none",
        "~ recipe.fp8.margin: 0.5 -> none",
        '~ recipe.fp8.scaling: ["tensorwise", null, true] -> none',
        '~ fingerprint: "0123456789abcdef" -> "fedcba9876543210"',
    ]
    assert PLAN.diff(other).moved == ("*::softmax",)
