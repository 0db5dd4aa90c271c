import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from shutil import which

import pytest

from autoprec.report.data import Interval
from autoprec.report.html import render

VOID = {"meta", "line", "rect", "path", "circle", "polyline", "br", "link"}


class Outline(HTMLParser):
    """Checks that elements nest, and keeps what they say."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open, self.tags, self.text, self.ids = [], [], [], []
        self.feed(document)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_document_nests_and_its_ids_are_unique(data):
    outline = Outline(render(data))
    assert len(outline.ids) == len(set(outline.ids))
    assert outline.tags.count("h1") == 1


def test_the_verdict_comes_first_and_the_command_last(data):
    text = " ".join(Outline(render(data)).text)
    parts = (
        "held back by", data.verdict, "Speed and loss", "inside the budget", "Pinned by the user", "Predicted against",
        "not finite", "init scale 1024", "host:17", "blocks.0", "no <kernel>", "Test CPU", data.command,
    )  # fmt: skip
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_a_users_text_is_escaped(data):
    document = render(data)
    assert "<b>0a1b" not in document
    assert "gpt-&lt;b&gt;0a1b" in document
    assert "<at step 3>" not in document
    assert "no kernel &amp; no &lt;fallback&gt;" in document


def test_the_report_needs_no_network_and_no_script(data):
    document = render(data)
    assert "<script" not in document
    assert not re.search(r"""(src|href)\s*=|url\(|https?://|@import""", document)


def test_a_site_that_got_something_else_stands_out(data):
    document = render(data)
    assert document.count('class="differs"') == 1
    assert "1 got something else" in document


def test_a_cell_says_what_its_colour_says(data):
    document = render(data)
    (over,) = re.findall(r'<td data-label="fp8_e4m3" class="heat over">(.*?)</td>', document, re.DOTALL)
    assert "predicted 13.3%, +0.610%" in over
    assert "over the budget" in over
    (chosen,) = re.findall(r'<td data-label="bf16" class="heat low chosen">(.*?)</td>', document, re.DOTALL)
    for part in ("✔ chosen", "saves 12.1 ± 0.4%", "loss +0.012 ± 0.002%", "in 3 mixes"):
        assert part in chosen, part


def test_a_share_of_noise_is_no_bar(data):
    document = render(data)
    assert document.count('class="bar gain"') == 1
    assert "width:62.0%" in document


def test_every_number_says_measured_or_estimated(data):
    assert "measured on this device" in render(data)
    guess = Interval(value=1.5, is_estimated=True)
    trials = tuple(replace(row, speedup=guess) for row in data.trials)
    confirmation = replace(data.confirmations[0], speedup=guess, control=None)
    document = render(replace(data, is_measured=False, trials=trials, confirmations=(confirmation,)))
    assert "speed estimated, unconfirmed" in document
    assert "measured on this device" not in document
    assert "speed estimated</text>" in document
    # each trial's cell, the marks of the front, and the confirmation
    assert document.count("1.50× (estimated)") == 5 + 4 + 1


def test_an_empty_study_is_still_a_report(data):
    text = " ".join(
        Outline(
            render(
                replace(
                    data, trials=(), confirmations=(), sites=(), curves=(), groups=(), formats=(), method=(), notes=(),
                    headlines=(), budget_pct=None,
                )
            )
        ).text
    )  # fmt: skip
    assert "No trial gave both" in text
    assert "No loss curve" in text
    assert "leaves every site in fp32" in text
    assert "no explanations" in text
    assert "Nothing was predicted" in text


def chromium(*arguments: str, profile: Path) -> str:
    """Run Debian's chromium without a window, as root too, and without looking for a network."""
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
    safe = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--enable-logging=stderr")
    command = ["chromium", *safe, *quiet, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_chromium_shows_all_of_it_without_scrolling_sideways(data, tmp_path, width):
    assert which("chromium"), "apt-get install chromium"
    # a frame, since a headless window isn't narrower than 500 px; it runs no script, and the outer page's measures it
    (tmp_path / "report.html").write_text(render(data))
    (tmp_path / "frame.html").write_text(
        f"<iframe id=f src=report.html sandbox=allow-same-origin "
        f"style='width:{width}px;height:20000px;border:0'></iframe>"
        "<pre id=out></pre><script>"
        "onload = () => { const d = f.contentDocument, e = d.documentElement;"
        "const high = t => t.getBoundingClientRect().height;"
        "const small = [...d.querySelectorAll('svg[role] text')].map(high).filter(h => h);"
        "const cut = [...d.querySelectorAll('body *')].filter(t => t.getBoundingClientRect().right > e.clientWidth + 1"
        " && t.tagName != 'THEAD').map(t => t.tagName);"
        "const cells = [...d.querySelectorAll('td')].filter(t => t.textContent.trim());"
        "const hidden = cells.filter(t => high(t) < 14).map(t => t.textContent);"
        "const letters = d.body.innerText.length;"
        "out.textContent = JSON.stringify([e.scrollWidth, e.clientWidth, Math.min(...small), cut, hidden, letters]) }"
        "</script>"
    )
    page = (tmp_path / "frame.html").as_uri()
    dom = chromium("--allow-file-access-from-files", "--dump-dom", page, profile=tmp_path / "profile")
    measured = re.search(r'<pre id="out">\[(\d+),(\d+),([\d.]+),\[(.*?)\],\[(.*?)\],(\d+)\]', dom)
    assert measured, dom[-2000:]
    scroll_width, client_width, smallest_text, cut, hidden, num_letters = measured.groups()
    assert int(scroll_width) <= int(client_width) == width
    assert (cut, hidden) == ("", "")
    assert float(smallest_text) >= 10
    assert int(num_letters) > 500


@pytest.mark.browser
def test_chromium_reports_an_error_of_a_page(tmp_path):
    """The check of the console above can fail."""
    (tmp_path / "broken.html").write_text("<script>console.error('broken')</script>")
    with pytest.raises(AssertionError, match="broken"):
        chromium("--dump-dom", (tmp_path / "broken.html").as_uri(), profile=tmp_path / "profile")
