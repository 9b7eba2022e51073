"""What a test has counted and the end of the run prints, passed or not: how many ties there were, say."""

from collections.abc import Callable

Note = Callable[[str], None]
