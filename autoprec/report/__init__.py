"""Reports: a result's numbers as HTML and on the console. Numbers first (``data``), then places, then the picture."""

from autoprec.report.html import render_report

__all__ = ["render_report"]
