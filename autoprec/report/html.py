"""A result as one HTML file: no network, no script, inline SVG."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from autoprec.report.chart import HEIGHT, WIDTH, curves_chart, front_chart
from autoprec.report.data import ReportData
from autoprec.report.read import read_result
from autoprec.report.scatter import gap_scatter, speed_scatter
from autoprec.report.timeline import timeline


def render_report(result: dict[str, Any], receipt: dict[str, Any] | None = None, command: str = "") -> str:
    """The report of a study.

    Args:
        result: what ``TuneResult.to_json()`` gives, or ``result.json`` holds.
        receipt: what ``Receipt.to_json()`` gives, or ``receipt.json`` holds; None where the answer is fp32.
        command: that ran the study; by default one made from its settings.

    Returns:
        A whole HTML document.
    """
    return render(read_result(result, receipt, command))


def render(data: ReportData) -> str:
    """The HTML document that shows ``data``."""
    return _template().render(
        data=data,
        front=front_chart(data.trials, data.budget_pct),
        curves=curves_chart(data.curves),
        speeds=speed_scatter(data.trials),
        gaps=gap_scatter(data.trials, data.budget_pct),
        line=timeline(data.trials),
        size={"width": WIDTH, "height": HEIGHT},
    )


@lru_cache(maxsize=1)
def _template() -> Template:
    # site names and task names are a user's text: all is escaped
    folder = Path(__file__).with_name("templates")
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")
