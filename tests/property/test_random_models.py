"""Random models of a grammar of ops: converted, each is as exact as rounding allows, and reverts bit for bit."""

import pytest
from acceptance import accept
from grammar import STEPS, Sentence, build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

#: An error may be this many times that of fp32 computation with rounded weights and inputs: a chain of steps rounds
#: what is between them too.
MULTIPLE = 4.0

steps = st.tuples(st.sampled_from(sorted(STEPS)), st.booleans(), st.booleans())
sentences = st.builds(Sentence, st.lists(steps, min_size=1, max_size=5).map(tuple), st.integers(0, 3))
formats = st.sampled_from(["bf16", "fp16"])

QUIET = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("format_name", ["bf16", "fp16"])
@pytest.mark.parametrize("name", STEPS)
def test_each_step_alone_converts(name: str, format_name: str) -> None:
    accept(lambda: build(Sentence(((name, True, False),))), format_name, MULTIPLE)


@settings(QUIET, max_examples=30)
@given(sentences, formats)
def test_random_models_convert(sentence: Sentence, format_name: str) -> None:
    accept(lambda: build(sentence), format_name, MULTIPLE)


@pytest.mark.slow
@settings(QUIET, max_examples=1000)
@given(sentences, formats)
def test_many_random_models_convert(sentence: Sentence, format_name: str) -> None:
    accept(lambda: build(sentence), format_name, MULTIPLE)
