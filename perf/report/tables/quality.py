"""What INT8 costs in quality."""

from __future__ import annotations

from perf.report.cells import figure, percent, whole
from perf.report.fields import Fields
from perf.report.run import Run
from perf.report.table import Column, Table, table


def quality(run: Run) -> Table | None:
    """Return a row for the unquantized weights and one for each way to quantize them; None if there are none."""
    rows = [fields for _, fields in run.fields.part("measurements").parts()]
    if not rows:
        return None
    settings = run.settings
    python = f" {settings.text('python')}" if "python" in settings else ""
    return table(
        [
            Column("weights", lambda row: row.text("title"), right=False),
            Column("MiB", lambda row: figure(row.number("weights_mib"))),
            Column("perplexity", lambda row: f"{row.number('perplexity'):.3f}"),
            Column("loss over the first row's, nats a token", _difference),
            Column("KL divergence mean / p99, nats", _divergence),
            Column("same best token", _agreement),
        ],
        rows,
        [
            f"On {settings.text('text')}{python}: {whole(settings.number('tokens'))} predicted "
            f"tokens in rows of at most {settings.count('context')}; ± is one standard error.",
            run.origin.line(),
        ],
    )


def _difference(row: Fields) -> str | None:
    difference = row.optional_part("loss_difference")
    if difference is None:
        return None
    return f"{difference.number('mean'):+.5f} ± {difference.number('standard_error'):.5f}"


def _divergence(row: Fields) -> str | None:
    divergence = row.optional_part("kl_nats")
    return None if divergence is None else f"{figure(divergence.number('mean'))} / {figure(divergence.number('p99'))}"


def _agreement(row: Fields) -> str | None:
    return percent(row.number("top1_agreement")) if "top1_agreement" in row else None
