import io
from dataclasses import replace

from rich.console import Console

from autoprec.report.console import report_view, result_view, sites_table
from autoprec.report.data import Interval


def printed(renderable) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    return console.file.getvalue()


def test_console_shows_the_numbers_of_the_page(data):
    text = printed(result_view(data))
    assert text.startswith(data.verdict)
    assert "measured on this device" in text
    assert "1.52× (1.50 to 1.55)" in text
    assert "+0.310% (+0.260 to +0.360)" in text
    assert "held back by" in text
    assert "over the 0.42%" in " ".join(text.replace("│", " ").split())


def test_console_leaves_out_the_candidates_off_the_front(data):
    text = printed(result_view(data))
    assert "mlp bf16" in text
    assert "all fp16" not in text


def test_the_whole_view_has_every_trial_and_every_format(data):
    text = printed(report_view(data))
    for part in ("all fp16", "init scale 1024", "* 12.1 ± 0.4%", "(13.3%, +0.610%)", "over the budget", data.command):
        assert part in text, part


def test_an_estimate_says_so_in_each_place(data):
    guess = Interval(value=1.5, is_estimated=True)
    trials = tuple(replace(row, speedup=guess) for row in data.trials)
    confirmation = replace(data.confirmations[0], speedup=guess, control=None)
    text = printed(report_view(replace(data, trials=trials, confirmations=(confirmation,), is_measured=False)))
    assert "speed estimated, unconfirmed" in text
    assert " ".join(text.replace("│", " ").split()).count("1.50× (estimated)") == 6
    assert "not timed" in text


def test_brackets_in_names_are_no_markup(data):
    text = printed(sites_table(data.sites))
    assert "blocks.0.attn::matmul#0" in text
    assert "no kernel & no <fallback>" in text
