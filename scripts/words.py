"""List phrases that have no place in this project's text, one line a hit: `file:line: phrase`. Exit code 1 if any.

Reads tracked text; skips what stays as it was written: the changelog, the measurement log, results, the checkpoint.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES = (
    r"whoever|nobody|anybody|somebody|everybody|so many|as (?:it|they|one) likes?",
    r"(?:comes|came) to|(?:is|are|was) (?:said|told)|says? so|knows? (?:neither|nothing)",
    r"lets? in|letting in|lets? go|gives? up|gave up|given up|giving up|held against|in vain|the others go on",
    r"\w+'s (?:own )?business|(?:\w+'s|theirs|its) and not \w+'s",
    r"seats?|seated|rivals?|weather|line-?up|contestants?|vitals|meter|ticket|transcripts?|banning|begun word|stolen",
)
# A phrase may go on in the next line, behind the sign of a comment.
PATTERN = re.compile(r"\b(?:" + "|".join(PHRASES).replace(" ", r"(?: |\n *#? ?)") + r")\b", re.IGNORECASE)
TEXT = ("*.py", "*.pyi", "*.md", "*.toml", "*.y*ml", "*.sh", "*.cfg", "*.pbtxt", "*Dockerfile", "Makefile", ".ci/run")
SKIPPED = ("scripts/words.py", "CHANGELOG.md", "perf/LOG.md", "perf/results", "models/pydoc-llama")


def hits() -> Iterator[tuple[str, int, str]]:
    """Yield file, line and phrase."""
    listed = subprocess.run(["git", "ls-files", *TEXT], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in (name for name in listed.splitlines() if not name.startswith(SKIPPED)):
        # Tables that `make report` renders have the words of committed results.
        text = re.sub(
            r"<!-- table.*?<!-- end", lambda block: "\n" * block[0].count("\n"), (ROOT / name).read_text(), flags=re.S
        )
        for match in PATTERN.finditer(text):
            yield name, text.count("\n", 0, match.start()) + 1, re.sub(r"[\s#]+", " ", match[0])


if __name__ == "__main__":
    found = list(hits())
    print("".join(f"{name}:{line}: {phrase}\n" for name, line, phrase in found), end="")
    sys.exit(bool(found))
