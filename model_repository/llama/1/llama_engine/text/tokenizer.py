"""The checkpoint's tokenizer: encodes prompts and maps token ids to bytes.

Generated text is handled as bytes because tokens can end within a character.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from llama_engine.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend", "GPT2Tokenizer", "GPT2TokenizerFast")
"""Values of `tokenizer_class` in tokenizer_config.json for which the generic class loads tokenizer.json.

transformers 5.23 replaces the pre-tokenizer in tokenizer.json by GPT-2's for the latter two; SmolLM has another one,
which takes digits one by one.
"""

REASONING_MARKERS = frozenset({"<think>", "</think>", "<seed:think>", "</seed:think>"})
"""Tokens with a text even if flagged as special: clients separate reasoning from the answer by them."""


class Vocabulary:
    """The bytes of every token id; empty for special tokens and for ids unknown to the tokenizer."""

    def __init__(self, token_bytes: list[bytes]) -> None:
        self.token_bytes = token_bytes

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
        """Read a byte-level (Llama 3) or SentencePiece-like (Llama 1 and 2) tokenizer.

        size: number of ids that the model can sample. Raises CheckpointError for other kinds of tokenizers.
        """
        # Imported here because importing transformers takes time; the tokenizer has it loaded.
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError("the tokenizer has no tokenizer.json; save it as a fast tokenizer first")
        kinds = set(_decoder_kinds(json.loads(backend.to_str())["decoder"]))
        to_bytes: Callable[[str], bytes]
        if "ByteLevel" in kinds:
            to_bytes = partial(_byte_level, {character: byte for byte, character in bytes_to_unicode().items()})
        elif kinds & {"ByteFallback", "Metaspace"}:
            to_bytes = _sentencepiece
        else:
            raise CheckpointError(f"the tokenizer decodes by {sorted(kinds)}: neither byte-level nor SentencePiece")
        added = tokenizer.added_tokens_decoder
        token_bytes = [b""] * size
        for token, index in tokenizer.get_vocab().items():
            if index >= size:
                continue
            if index in added:
                hidden = added[index].special and token not in REASONING_MARKERS
                token_bytes[index] = b"" if hidden else added[index].content.encode()
            else:
                token_bytes[index] = to_bytes(token)
        return cls(token_bytes)

    @cached_property
    def longest(self) -> int:
        """Length of the longest token in bytes."""
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
        """Return the ids whose bytes contain `text` (not empty)."""
        joined, starts = self._joined
        tokens: list[int] = []
        position = joined.find(text)
        while position >= 0:
            index = bisect_right(starts, position) - 1
            if position + len(text) <= starts[index + 1]:
                tokens.append(index)
            # Skip to the next token: a later match within this token adds nothing.
            position = joined.find(text, starts[index + 1])
        return tokens

    def starting_with(self, text: bytes) -> list[int]:
        """Return the ids whose bytes start with `text` (not empty)."""
        by_bytes, order = self._sorted
        start = bisect_left(by_bytes, text)
        # The end of the range is at `text` with its last byte incremented; trailing 0xff bytes are dropped first.
        head = text.rstrip(b"\xff")
        end = bisect_left(by_bytes, head[:-1] + bytes([head[-1] + 1])) if head else len(by_bytes)
        return order[start:end]


@dataclass(frozen=True)
class Tokenizer:
    """A transformers tokenizer (`pretrained`) and its vocabulary as bytes."""

    pretrained: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    # This cache is bounded by the size of the vocabulary.
    _in_json: dict[int, str] = field(default_factory=dict, repr=False, compare=False)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt with those that the tokenizer adds, such as BOS; a second BOS is dropped."""
        # verbose=False: no warning about prompts beyond the tokenizer's limit; the caller checks max_model_len.
        tokens = tuple(self.pretrained(text, verbose=False)["input_ids"])
        bos = self.pretrained.bos_token_id
        # A rendered chat template contains a BOS, and the tokenizer adds a second one, which models aren't trained on.
        return tokens[1:] if bos is not None and tokens[:2] == (bos, bos) else tokens

    def token_in_json(self, token: int) -> str:
        """Return a token's text, and its bytes where they are not the text's, as members of a JSON object.

        The text is the name of a special token, which has no bytes, and has U+FFFD for a part of a character.
        """
        if (known := self._in_json.get(token)) is not None:
            return known
        token_bytes = self.vocabulary.token_bytes[token]
        # Ids unknown to the tokenizer have an empty name.
        text = token_bytes.decode(errors="replace") or str(self.pretrained.convert_ids_to_tokens(token) or "")
        members = f'"decoded_token": {json.dumps(text)}'
        if text.encode() != token_bytes:
            members += f', "bytes": {list(token_bytes)}'
        return self._in_json.setdefault(token, members)

    @property
    def chat_templates(self) -> dict[str, str]:
        """The checkpoint's chat templates by name: `default`, and others such as `tool_use`; empty without one."""
        templates = self.pretrained.chat_template or {}
        return {"default": templates} if isinstance(templates, str) else dict(templates)

    def encode_inside(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text within a prompt; unlike `encode`, this adds no special tokens such as BOS."""
        return tuple(self.pretrained(text, add_special_tokens=False, verbose=False)["input_ids"])


def read_tokenizer(folder: Path, config: PreTrainedConfig) -> Tokenizer:
    """Return the checkpoint's tokenizer: tokenizer.json, or another format that transformers can convert.

    Raises CheckpointError.
    """
    try:
        pretrained = _from_files(folder, config)
        tokenizer = Tokenizer(pretrained, Vocabulary.from_tokenizer(pretrained, config.vocab_size))
        # Some invalid parts fail only here.
        tokenizer.encode("def é")
    except CheckpointError:
        raise
    except BaseException as error:
        # A panic of tokenizers' Rust code has no class that could be imported, and is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"tokenizer.json or tokenizer_config.json: {one_line(error)}"
        if not (folder / "tokenizer.json").exists():
            reason = f"it has no tokenizer.json; save the tokenizer as a fast one first ({one_line(error)})"
        raise CheckpointError(f"can't load {folder}: {reason}") from error
    return tokenizer


def _from_files(folder: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    path = folder / "tokenizer_config.json"
    named = json.loads(path.read_bytes()).get("tokenizer_class") if path.exists() else None
    if named in GENERAL and (folder / "tokenizer.json").exists():
        # AutoTokenizer would choose the same class, but importing it takes 0.25 s.
        from transformers import PreTrainedTokenizerFast

        pretrained: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
    else:
        from transformers import AutoTokenizer

        pretrained = AutoTokenizer.from_pretrained(folder, config=config)
    return pretrained


def _decoder_kinds(decoder: dict[str, object] | None) -> Iterator[str]:
    if decoder is None:
        return
    yield str(decoder["type"])
    for part in decoder.get("decoders", []):  # type: ignore[attr-defined]  # a Sequence holds a list of decoders
        yield from _decoder_kinds(part)


def _byte_level(alphabet: Mapping[str, int], token: str) -> bytes:
    # A token with characters outside the alphabet is its own text, as in the tokenizers library.
    if not alphabet.keys() >= set(token):
        return token.encode()
    return bytes(alphabet[character] for character in token)


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _sentencepiece(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace("▁", " ").encode()
