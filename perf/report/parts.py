"""An overhead account in a result's file: the runs that were compared, and the parts that each one's time went into."""

from __future__ import annotations

from perf.overhead.parts import PartJSON
from perf.report.fields import Fields
from perf.report.run import Run

RUNS = {
    "server": "through Triton",
    "engine": "the bare engine",
    "slot_forward": "its passes alone, through the slot model",
    "forward": "the same passes through transformers' forward",
}
"""What was compared, each with less around the same computation than the one before."""


def account(run: Run) -> Fields | None:
    """Return the run's account; None if it has none."""
    return run.fields.optional_part("overhead")


def load(found: Fields) -> str:
    """Return what was sent, in words."""
    settings = found.part("settings")
    return (
        f"{settings.count('requests')} requests of {settings.text('mix')} lengths, {settings.count('slots')} rows at a "
        f"time, quantization {settings.text('quantization')}"
    )


def parts(found: Fields) -> list[PartJSON]:
    """Return the parts in the file's order: each behind its parent, the larger ones first."""
    return [
        {
            "name": part.text("name"),
            "parent": part.text("parent") if part.plain("parent") else "",
            "seconds": part.number("seconds"),
            "share": part.number("share"),
            "per_token_us": part.number("per_token_us"),
        }
        for part in found.listed("parts")
    ]
