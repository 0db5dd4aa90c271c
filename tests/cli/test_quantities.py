import pytest

from autoprec.cli.quantities import parse_duration, parse_share
from autoprec.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("2min", 120), ("1.5h", 5400), (" 2 h ", 7200)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "2 weeks", "h", "1h30"])
def test_what_is_no_duration_is_refused_with_how_to_write_one(text):
    with pytest.raises(UsageError, match="15m"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "share"), [("0.5%", 0.005), ("0.005", 0.005), (".5 %", 0.005), ("5e-3", 0.005)])
def test_shares(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "0", "0%", "5", "150%", "-1%", "half", "nan"])
def test_what_is_no_share_is_refused_with_how_to_write_one(text):
    with pytest.raises(UsageError, match=r"0\.5% or 0\.005"):
        parse_share(text)
