"""The cells of a Markdown table."""

from __future__ import annotations


def cells(markdown: str) -> list[list[str]]:
    """The table's cells, its titles first and without the line below them."""
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def column(markdown: str, title: str) -> list[str]:
    titles, *rows = cells(markdown)
    return [row[titles.index(title)] for row in rows]
