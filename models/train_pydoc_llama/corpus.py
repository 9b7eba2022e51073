"""The corpus: raw documents made clean, unique and split into training and held-out text.

Independent of tokens. The result depends only on the Python installation; its SHA-256 identifies it.
"""

import hashlib
import platform
import re
from collections import Counter
from dataclasses import dataclass

from models.train_pydoc_llama.sources import Document, all_documents

HELD_OUT_PERCENT = 3
# Set before training: without it the topics on with, import and yield were held out, and the demo asks about those.
SPLIT_SALT = "pydoc"
MIN_LETTERS = 25  # "See base class." and shorter carry no information
MIN_LINE_TO_JOIN = 48  # a shorter line was broken by its author, not by the right margin
SPECIAL_TEXT = re.compile(r"</?s>|<unk>|<pad>|<</?SYS>>|\[/?INST\]")


@dataclass(frozen=True)
class Corpus:
    """The two sides of the split in a fixed order. Paragraphs are separated by blank lines, and prose is unwrapped."""

    training: list[Document]
    held_out: list[Document]

    def describe(self) -> dict[str, object]:
        """Return the data's facts for the model card: counts, characters, SHA-256, the Python it came from."""
        everything = self.training + self.held_out
        characters: Counter[str] = Counter()
        for document in everything:
            characters[document.kind] += len(document.text)
        digest = hashlib.sha256()
        for document in everything:
            digest.update("\0".join((document.kind, document.name, document.signature, document.text)).encode())
            digest.update(b"\0\0")
        return {
            "sha256": digest.hexdigest(),
            "python": platform.python_version(),
            "documents": {"training": len(self.training), "held_out": len(self.held_out)},
            "characters": {
                "training": sum(len(document.text) for document in self.training),
                "held_out": sum(len(document.text) for document in self.held_out),
            },
            "characters_by_kind": dict(sorted(characters.items())),
        }


def build_corpus() -> Corpus:
    """Read, clean, drop duplicates, split."""
    seen: set[str] = set()
    training: list[Document] = []
    held_out: list[Document] = []
    for raw in all_documents():
        document = _clean(raw)
        letters = _letters(document.text)
        if len(letters) < MIN_LETTERS or letters in seen:
            continue
        seen.add(letters)
        (held_out if _is_held_out(letters) else training).append(document)
    return Corpus(training, held_out)


def _letters(text: str) -> str:
    """Return the text without case, spaces, digits and punctuation: similar inherited docstrings become equal."""
    return re.sub(r"[^a-z]", "", text.lower())


def _is_held_out(letters: str) -> bool:
    """Return whether a document is held out.

    Those that begin alike fall on the same side, so that no variant of a held-out text is trained on.
    """
    return (
        int.from_bytes(hashlib.sha256(f"{SPLIT_SALT}{letters[:48]}".encode()).digest()[:4], "big") % 100
        < HELD_OUT_PERCENT
    )


def _clean(raw: Document) -> Document:
    text = raw.text.replace("\r\n", "\n").replace("\f", "\n").expandtabs(4)
    text = SPECIAL_TEXT.sub("", text)
    text = re.sub(r"[*=~#_-]{9,}", "", text)  # rulers and underlined headings
    text = unwrap(text)
    return Document(raw.kind, raw.name, raw.signature if len(raw.signature) <= 120 else "(...)", text)


def unwrap(text: str) -> str:
    """Join lines that were broken at the right margin: where a line ends is not worth a small model's attention."""
    joined: list[str] = []
    previous_length = 0
    for line in (part.rstrip() for part in text.split("\n")):
        if joined and _continues(joined[-1], previous_length, line):
            joined[-1] += " " + line.lstrip()
        else:
            joined.append(line)
        previous_length = len(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(joined)).strip("\n")


def _continues(before: str, previous_length: int, line: str) -> bool:
    indent = len(line) - len(line.lstrip())
    indent_before = len(before) - len(before.lstrip())
    bullet = re.match(r" *([*-]|\d+[.)]) +", before)
    aligned = indent == indent_before or (bullet is not None and indent == bullet.end())
    starts_prose = re.match(r" *[A-Za-z(\"'`]", line) is not None
    looks_like_code = re.search(
        r"^ *(>>>|\.\.\. |def |class |import |from \w+ import)|  +\S+ +- | = |^\S+\(.*\) ->", before
    )
    return aligned and starts_prose and previous_length >= MIN_LINE_TO_JOIN and not looks_like_code
