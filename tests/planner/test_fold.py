"""Folded names match exactly the names that went in."""

import fnmatch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.planner.fold import fold, literal, number_globs


def matched(globs, names):
    return {name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)}


@pytest.mark.parametrize(
    ("numbers", "globs"),
    [
        (range(1, 31), ("[1-9]", "[12][0-9]", "30")),
        (range(1, 79), ("[1-9]", "[1-6][0-9]", "7[0-8]")),
        (range(10), ("[0-9]",)),
        ([3], ("3",)),
        ([1, 2], ("[12]",)),
        ([0, 1, 2, 5, 7, 8, 9], ("[0-257-9]",)),
        ([10, 21], ("10", "21")),
        ([10, 11, 20, 21], ("[12][01]",)),
        ([9, 10, 99, 100], ("9", "10", "99", "100")),
    ],
)
def test_number_ranges(numbers, globs):
    assert number_globs(map(str, numbers)) == globs


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 1200), min_size=1, max_size=80))
def test_numbers_fold_exactly(numbers):
    everything = [str(n) for n in range(1300)]
    assert matched(number_globs(map(str, numbers)), everything) == {str(n) for n in numbers}


parts = st.sampled_from(["a", "b", "0", "1", "2", "10", "11", "x[y]", "q*", "z?"])
fqns = st.lists(parts, min_size=1, max_size=4).map(".".join)


@settings(max_examples=300, deadline=None)
@given(st.sets(fqns, min_size=1, max_size=30), st.sets(fqns, max_size=30))
def test_names_fold_exactly_whatever_they_hold(names, others):
    assert matched(fold(names), names | others) == names


def test_a_name_and_the_same_name_with_a_number_stay_apart():
    assert set(fold(["a", "a.0", "a.1", "a.0.b"])) == {"a", "a.[01]", "a.0.b"}


def test_two_numbered_places_fold_into_one_glob():
    names = [f"layers.{i}.experts.{j}.up" for i in range(1, 9) for j in range(10)]
    assert fold(names) == ("layers.[1-8].experts.[0-9].up",)


def test_special_characters_are_meant_literally():
    assert fnmatch.fnmatchcase("a*b", literal("a*b"))
    assert not fnmatch.fnmatchcase("axb", literal("a*b"))
