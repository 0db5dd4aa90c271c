"""Sensitivity: which precision each site of a model needs, and why."""

from autoprec.analyze.api import analyze
from autoprec.analyze.report import Analysis, SiteReport, Verdict

__all__ = ["Analysis", "SiteReport", "Verdict", "analyze"]
