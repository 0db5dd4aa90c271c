"""A result's JSON as a report's data."""

from typing import Any

from autoprec.report.data import ReportData


def read_result(result: dict[str, Any]) -> ReportData:
    raise NotImplementedError
