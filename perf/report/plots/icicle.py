"""Where a request's and a step's time goes, as the account's own picture."""

from __future__ import annotations

from perf.overhead.picture import picture
from perf.report.parts import account, load, parts
from perf.report.run import Run


def icicle(run: Run) -> str | None:
    """Draw the parts of the run's overhead account."""
    found = account(run)
    return None if found is None else picture(parts(found), f"{run.origin.subject}; {load(found)}")
