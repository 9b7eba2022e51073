"""The tokenizer of a GGUF file, or the tokenizer.json beside it.

transformers converts the vocabulary. Here its pre-tokenizer is checked, because transformers takes GPT-2's for those it
doesn't know, and the rest is corrected. Source: `load` in llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from llama_engine.bounds import show
from llama_engine.checkpoint.gguf.header import GgufFile
from llama_engine.errors import CheckpointError, one_line
from llama_engine.request.end_tokens import END_TOKENS
from llama_engine.text.tokenizer import Tokenizer, Vocabulary, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
"""Pre-tokenizers whose words are one token where the vocabulary has it, whatever the merges; they begin with BOS."""

_TRANSFORMERS_PRE_TOKENIZERS = {*_WHOLE_WORDS, "dbrx", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "megrez", "gpt-4o"}

_GPT2 = {"gpt-2", "olmo", "phi-2", "mpt"}

_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
"""llama.cpp's default pre-tokenizer: each expression splits the parts that those before it have left."""

_NO_PRE = (
    "texts are split as by llama.cpp's default, and the model may have been trained with another way; convert it with "
    "a newer converter, or put its tokenizer.json beside it"
)

_MAX_TOKEN = 4096
"""Longest token; real ones have at most some hundred characters."""

_SINGLE_DIGITS = {"smollm", "refact", "starcoder", "command-r", "codeshell"}
"""Pre-tokenizers that split off each digit before GPT-2's words."""


def read_gguf_tokenizer(file: GgufFile, config: PreTrainedConfig) -> Tokenizer:
    """Return the tokenizer. Raises CheckpointError if it isn't supported, and exceptions of the libraries."""
    folder = file.path.parent
    if (folder / "tokenizer.json").exists():
        tokenizer = read_tokenizer(folder, config)
        # Converters keep the template in the file, and tokenizer_config.json may be missing.
        tokenizer.pretrained.chat_template = tokenizer.pretrained.chat_template or _chat_template(file)
        return tokenizer
    try:
        pretrained = _converted(file)
    except Exception as error:
        # transformers and tokenizers have no common base class of exceptions.
        raise file.error(
            f"its tokenizer can't be read ({one_line(error)}); put the model's tokenizer.json and "
            "tokenizer_config.json beside it"
        ) from error
    return Tokenizer(pretrained, Vocabulary.from_tokenizer(pretrained, config.vocab_size))


def token_id(file: GgufFile, kind: str) -> int | None:
    """Return the number of a special token, None if the file has none."""
    value = file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
    if value is not None and not isinstance(value, int):
        raise file.error(f"tokenizer.ggml.{kind}_token_id isn't an integer")
    return value


def end_tokens(file: GgufFile) -> list[int] | int | None:
    """Return those that the file names, which are three at most, and known ones in its vocabulary, as llama.cpp."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    texts = {token: number for number, token in enumerate(tokens if isinstance(tokens, tuple) else ())}
    named = [token_id(file, kind) for kind in ("eos", "eot", "eom")]
    found = [number for number in named if number is not None] + [texts[end] for end in END_TOKENS if end in texts]
    ends = list(dict.fromkeys(found))
    return (ends[0] if len(ends) == 1 else ends) if ends else None


def _converted(file: GgufFile) -> PreTrainedTokenizerBase:
    kind, pre = file.text("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not isinstance(tokens, tuple):
        raise CheckpointError(f"tokenizer.ggml.model is {show(kind)}; this engine reads gpt2 and llama")
    if (longest := max((len(str(token)) for token in tokens), default=0)) > _MAX_TOKEN:
        # Merges are computed from all pairs of parts of each token.
        raise CheckpointError(f"tokenizer.ggml.tokens has one of {longest} characters; it must be at most {_MAX_TOKEN}")
    if kind == "llama":
        # SentencePiece has none; converters write "default".
        pre = None
    elif pre is None:
        _log.warning("%s: it has no tokenizer.ggml.pre: %s", file.path, _NO_PRE)
        pre = "default"
    if kind == "gpt2" and pre not in {"default", *_TRANSFORMERS_PRE_TOKENIZERS, *_GPT2, *_SINGLE_DIGITS}:
        raise CheckpointError(f"tokenizer.ggml.pre is {show(pre)}, which this engine doesn't know")
    # Imported here because a checkpoint in safetensors may need another class.
    from transformers import PreTrainedTokenizerFast

    read = PreTrainedTokenizerFast.from_pretrained(file.path.parent, gguf_file=file.path.name)
    values = json.loads(read.backend_tokenizer.to_str())
    # GPT-2's special tokens are added to a vocabulary that lacks them; the model has no embedding for them.
    values["added_tokens"] = [token for token in values["added_tokens"] if token["id"] < len(tokens)]
    if kind == "llama":
        _set_space_prefix(values, file)
    values["model"]["ignore_merges"] = pre in _WHOLE_WORDS
    if pre == "default":
        _split_before(values, [_split(expression) for expression in _DEFAULT])
        values["pre_tokenizer"]["pretokenizers"][-1]["use_regex"] = False
    elif pre in _SINGLE_DIGITS:
        _split_before(values, [{"type": "Digits", "individual_digits": True}])
    begins = file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _WHOLE_WORDS)
    return PreTrainedTokenizerFast(
        tokenizer_object=type(read.backend_tokenizer).from_str(json.dumps(values)),
        clean_up_tokenization_spaces=False,
        add_bos_token=bool(begins) and read.bos_token is not None,
        chat_template=_chat_template(file),
        bos_token=read.bos_token,
        eos_token=read.eos_token,
        unk_token=read.unk_token,
        pad_token=read.pad_token,
    )


def _chat_template(file: GgufFile) -> str | dict[str, str] | None:
    """Return the chat template as transformers has it: one text, or texts by name if there are named ones."""
    key = "tokenizer.chat_template"
    texts = {name: text for name, text in file.metadata.items() if isinstance(text, str)}
    named = {name.removeprefix(f"{key}."): text for name, text in texts.items() if name.startswith(f"{key}.")}
    if not named:
        return texts.get(key)
    return {"default": texts[key], **named} if key in texts else named


def _split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _split_before(values: dict[str, Any], splits: list[dict[str, Any]]) -> None:
    """Make a tokenizer split texts before its own pre-tokenizer."""
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, values["pre_tokenizer"]]}


def _set_space_prefix(values: dict[str, Any], file: GgufFile) -> None:
    """Make a SentencePiece tokenizer add a space before the text only where the file says so."""
    splits = values["pre_tokenizer"]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True) or splits is None or splits["type"] != "Metaspace":
        return
    splits["prepend_scheme"] = "never"
    values["decoder"]["decoders"] = [part for part in values["decoder"]["decoders"] if part["type"] != "Strip"]
