"""The cache of costs: what it belongs to, damage, and several processes at once."""

import json
import logging
import multiprocessing

import pytest
import torch

import autoprec
from autoprec.errors import UsageError
from autoprec.measure.costcache import CostCache, Reading, identity_of

HERE = {"device": "this one"}


def reading(value: float = 1.5, label: str = "") -> Reading:
    return Reading(value=value, low=value / 2, high=value * 2, rounds=5, date="2026-11-29T12:00:00+00:00", label=label)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "costs.json"


def test_readings_survive_the_disk(path):
    cache = CostCache(path, HERE)
    assert cache.get("linear") is None
    cache.put("linear", reading(label="linear 4x4"))
    assert cache.get("linear") == reading(label="linear 4x4")
    assert not path.exists()
    cache.save()
    again = CostCache(path, HERE)
    assert again.get("linear") == reading(label="linear 4x4")
    assert len(again) == 1


def test_a_cache_of_something_else_is_not_used(path):
    cache = CostCache(path, HERE)
    cache.put("linear", reading())
    cache.save()
    assert CostCache(path, {"device": "another"}).get("linear") is None


def test_the_file_of_a_device_goes_by_versions_and_threads(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPREC_CACHE_DIR", str(tmp_path))
    identity = identity_of("cpu")
    assert identity["autoprec"] == autoprec.__version__
    assert identity["torch"] == torch.__version__
    assert identity["threads"] == torch.get_num_threads()
    here = CostCache.of_device("cpu").path
    assert here.parent == tmp_path
    assert CostCache.of_device("cpu").path == here
    monkeypatch.setattr(torch, "get_num_threads", lambda: 96)
    assert CostCache.of_device("cpu").path != here


def test_costs_in_fp32_and_in_what_torch_may_make_of_it_are_kept_apart():
    switch = torch.backends.mkldnn.matmul
    before, setting = identity_of("cpu"), switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        assert identity_of("cpu") != before
    finally:
        switch.fp32_precision = setting
    assert identity_of("cpu") == before


def test_what_others_wrote_meanwhile_stays(path):
    one, other = CostCache(path, HERE), CostCache(path, HERE)
    one.put("a", reading(1.0))
    other.put("b", reading(2.0))
    one.save()
    other.save()
    both = CostCache(path, HERE)
    assert (both.get("a"), both.get("b")) == (reading(1.0), reading(2.0))


def write_many(path, worker):
    for k in range(10):
        cache = CostCache(path, HERE)
        cache.put(f"{worker}/{k}", reading(1.0 + worker))
        cache.save()


def test_several_processes_lose_nothing(path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=write_many, args=(path, worker)) for worker in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    cache = CostCache(path, HERE)
    assert len(cache) == 20
    assert all(cache.get(f"{worker}/{k}") == reading(1.0 + worker) for worker in range(2) for k in range(10))


def test_damage_is_said_and_measured_again(path, caplog):
    cache = CostCache(path, HERE)
    cache.put("linear", reading())
    cache.save()
    good = json.loads(path.read_text())
    (entry,) = good["readings"].values()
    bad = [{**entry, name: value} for name in ("value", "low", "high") for value in (-1.0, 0.0, "1", None, 1e999)]
    bad += [{**entry, "rounds": 1.5}, {k: v for k, v in entry.items() if k != "date"}, [], None]
    damages = ["", "{", "[]", "null", "\x00" * 10, "[" * 100_000, json.dumps({"schema": 1})]
    damages += [json.dumps(good | {"readings": {"linear": values}}) for values in bad]
    for damage in damages:
        path.write_text(damage)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "autoprec.measure.costcache"):
            cache = CostCache(path, HERE)
        assert cache.get("linear") is None, damage[:80]
        assert "can't be used" in caplog.text, damage[:80]
        cache.put("linear", reading(3.0))
        cache.save()
        assert CostCache(path, HERE).get("linear") == reading(3.0)


def test_a_file_of_another_schema_is_left_unused_without_a_word(path, caplog):
    path.parent.mkdir()
    path.write_text(json.dumps({"schema": 99, "identity": HERE, "readings": {}}))
    with caplog.at_level(logging.WARNING):
        assert len(CostCache(path, HERE)) == 0
    assert caplog.text == ""


def test_an_unwritable_cache_is_said(path, caplog):
    path.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "autoprec.measure.costcache"):
        cache = CostCache(path, HERE)
        cache.put("linear", reading())
        cache.save()
    assert "can't be kept" in caplog.text
    assert cache.get("linear") == reading()


def test_a_reading_is_a_positive_number():
    with pytest.raises(UsageError, match="positive finite numbers"):
        reading(-1.0)
    with pytest.raises(UsageError, match="positive finite numbers"):
        reading(float("nan"))
