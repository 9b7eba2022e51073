"""What the command line's group passes to its end: not the commands' business."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CliSettings:
    """Options that stand before the command."""

    debug: bool = False
