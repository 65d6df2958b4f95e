"""The HTML report of an experiment: one file that opens from disk and asks no network for anything."""

from kvbench.report.gathered import gather
from kvbench.report.page import page, write

__all__ = ["gather", "page", "write"]
