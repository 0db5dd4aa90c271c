"""A finished study's files, found by the study's name, its folder or the file itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoprec.errors import StudyError, UsageError
from autoprec.report.data import ReportData
from autoprec.report.read import read_result

#: Of result.json, as :mod:`autoprec.tune.answers.result` writes it; a report needs neither that module nor torch.
SCHEMA_VERSION = 1
RESULT, RECEIPT, SETTLED = "result.json", "receipt.json", "settled.json"
#: Where ``autoprec tune`` puts a study's folder by itself.
RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A result, and what a report shows of it.

    Args:
        path: of the result's file.
        data: its numbers.
    """

    path: Path
    data: ReportData


def load_result(study: str) -> Loaded:
    """The result of a finished study.

    Args:
        study: a folder, a ``result.json``, or the name of a study under ``runs/``.

    Raises:
        UsageError: there is no such study.
        StudyError: it hasn't ended, or its result can't be read.
    """
    path = _find(study)
    result = _read(path)
    version = result.get("schema_version")
    if version != SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        what = "a newer autoprec wrote it; upgrade" if newer else "it is no result of autoprec tune"
        raise StudyError(f"{path} has schema_version {version!r}, and this autoprec reads {SCHEMA_VERSION}: {what}")
    receipt, settled = (_read(file) if file.is_file() else None for file in map(path.with_name, (RECEIPT, SETTLED)))
    try:
        data = read_result(result, receipt)
        if settled is not None:
            data = replace(data, settled=f"Measured on {settled['environment']['device']} since: {settled['verdict']}")
        return Loaded(path=path, data=data)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise StudyError(
            f"{path} is damaged ({type(error).__name__}: {error}): restore it, or let the same 'autoprec tune' write "
            "it again, which measures no trial twice"
        ) from error


def _find(study: str) -> Path:
    given, named = Path(study), RUNS / study
    for path in (given, given / RESULT, named / RESULT):
        if path.is_file():
            return path
    for folder in (given, named):
        if folder.is_dir() and any(folder.iterdir()):
            raise StudyError(
                f"{folder} holds no {RESULT}, which a study writes at its end: the same 'autoprec tune' goes on with it"
            )
    known = sorted(file.parent.name for file in RUNS.glob(f"*/{RESULT}"))
    finished = f"; finished in {RUNS}/: {', '.join(known)}" if known else ""
    raise UsageError(f"{study!r} is no folder of a study, no {RESULT} and no study under {RUNS}/{finished}")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StudyError(f"{path} can't be read: {error}") from error
    if not isinstance(data, dict):
        raise StudyError(f"{path} holds a {type(data).__name__}, and no result of autoprec tune")
    return data
