import io

from rich.console import Console

from autoprec.report.console import result_view, sites_table


def printed(renderable) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    return console.file.getvalue()


def test_console_shows_the_numbers_of_the_page(data):
    text = printed(result_view(data))
    assert text.startswith(data.verdict)
    assert "measured on this device" in text
    assert "1.52× (1.50 to 1.55)" in text
    assert "0.310% (0.260 to 0.360)" in text


def test_console_leaves_out_the_candidates_off_the_front(data):
    text = printed(result_view(data))
    assert "mlp bf16" in text
    assert "all fp16" not in text


def test_brackets_in_names_are_no_markup(data):
    text = printed(sites_table(data.sites))
    assert "blocks.0.attn::matmul#0" in text
    assert "no kernel & no <fallback>" in text
