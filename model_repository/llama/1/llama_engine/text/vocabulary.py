"""Tokens as bytes.

Text that grows token by token is handled as bytes, because tokens don't end where characters do. This module knows what
bytes a token stands for and which tokens could complete a given string; it knows neither requests nor the model.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from llama_engine.errors import CheckpointError


class Vocabulary:
    """What every token id stands for. Special tokens, and ids the tokenizer doesn't know, stand for nothing."""

    def __init__(self, token_bytes: list[bytes]) -> None:
        self.token_bytes = token_bytes

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
        """Read the pieces of a byte-level (Llama 3) or SentencePiece-like (Llama 1 and 2) tokenizer.

        size: ids the model can produce. Raises CheckpointError for a tokenizer of another kind.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError("the tokenizer has no tokenizer.json; save it as a fast tokenizer first")
        kinds = set(_decoder_kinds(json.loads(backend.to_str())["decoder"]))
        if "ByteLevel" in kinds:
            to_bytes = _byte_level
        elif kinds & {"ByteFallback", "Metaspace"}:
            to_bytes = _sentencepiece
        else:
            raise CheckpointError(f"the tokenizer decodes by {sorted(kinds)}: neither byte-level nor SentencePiece")
        added = tokenizer.added_tokens_decoder
        pieces = [b""] * size
        for token, index in tokenizer.get_vocab().items():
            if index >= size:
                continue
            if index in added:
                pieces[index] = b"" if added[index].special else added[index].content.encode()
            else:
                pieces[index] = to_bytes(token)
        return cls(pieces)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest piece."""
        return max(map(len, self.token_bytes))

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        order = sorted(range(len(self.token_bytes)), key=self.token_bytes.__getitem__)
        return [self.token_bytes[index] for index in order], order

    @cached_property
    def _joined(self) -> tuple[bytes, list[int]]:
        starts = [0, *accumulate(map(len, self.token_bytes))]
        return b"".join(self.token_bytes), starts

    def containing(self, text: bytes) -> list[int]:
        """Return the ids whose piece contains `text` (not empty)."""
        joined, starts = self._joined
        found: list[int] = []
        position = joined.find(text)
        while position >= 0:
            index = bisect_right(starts, position) - 1
            inside = position + len(text) <= starts[index + 1]
            if inside:
                found.append(index)
            # Behind a match the rest of the piece has nothing to add; a match over a border may hide one behind it.
            position = joined.find(text, starts[index + 1] if inside else position + 1)
        return found

    def starting_with(self, text: bytes) -> list[int]:
        """Return the ids whose piece starts with `text` (not empty)."""
        pieces, order = self._sorted
        start = bisect_left(pieces, text)
        # The first string after all that start with `text`; 0xff bytes at the end can't be counted up.
        head = text.rstrip(b"\xff")
        end = bisect_left(pieces, head[:-1] + bytes([head[-1] + 1])) if head else len(pieces)
        return order[start:end]


def _decoder_kinds(decoder: dict[str, object] | None) -> Iterator[str]:
    if decoder is None:
        return
    yield str(decoder["type"])
    for part in decoder.get("decoders", []):  # type: ignore[attr-defined]  # a Sequence holds a list of decoders
        yield from _decoder_kinds(part)


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable characters to the bytes they stand for."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + offset): byte for offset, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    # As the tokenizers library has it: a token outside the alphabet stands for itself.
    if not _ALPHABET.keys() >= set(token):
        return token.encode()
    return bytes(_ALPHABET[character] for character in token)


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
