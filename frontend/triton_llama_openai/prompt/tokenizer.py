"""A checkpoint's tokenizer, chat template and context, without its weights; /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from huggingface_hub import snapshot_download
from tokenizers import Tokenizer

from triton_llama_openai.errors import invalid
from triton_llama_openai.prompt.chat_template import ChatTemplate, InvalidTemplateError, render_messages
from triton_llama_openai.prompt.conversation import template_tool
from triton_llama_openai.prompt.special_tokens import RenderedPrompt, SpecialTokenGuard
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from triton_llama_openai.settings import InvalidSettingsError, Settings

EMBEDDED = Path(__file__).resolve().parents[3] / "models" / "pydoc-llama"
"""The embedded checkpoint of a source checkout; an installed package needs the setting `tokenizer`."""

_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja")
_DEFAULT_CLASS = "PreTrainedTokenizerFast"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's tokenizer side.

    context: tokens of prompt and completion. special_tokens: bos_token … pad_token, empty where there is none.
    digest: of the files that were read. tokenizer_class: transformers' name of the tokenizer's class.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    context: int
    special_tokens: dict[str, str]
    digest: bytes
    tokenizer_class: str = _DEFAULT_CLASS

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return a text's tokens. With special tokens, a BOS in the text is doubled, which the server undoes."""
        # Of a batch: only these calls release Python's lock, so that in a thread they stop no event loop.
        (encoded,) = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def num_tokens(self, text: str) -> int:
        """Return how many tokens a text by itself has."""
        return len(self.encode(text, add_special_tokens=False)) if text else 0

    def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """Return a prompt's tokens as the server sees them."""
        if not isinstance(prompt, str):
            return prompt
        return self._without_second_bos(self.encode(prompt, add_special_tokens=True))

    @cached_property
    def guard(self) -> SpecialTokenGuard:
        """Keeps special tokens out of clients' texts."""
        return SpecialTokenGuard(self.tokenizer, "" if self.template is None else self.template.turn_text())

    def prompt_of(self, rendered: RenderedPrompt) -> str | list[int]:
        """Return a conversation's prompt: its text, or its tokens where clients' texts have special tokens in them."""
        if not rendered.placeholders:
            return rendered.text
        return self._without_second_bos(self.guard.encode(rendered, add_special_tokens=True))

    def _without_second_bos(self, tokens: list[int]) -> list[int]:
        bos = self.tokenizer.token_to_id(self.special_tokens["bos_token"])
        return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, special ones included."""
        (text,) = self.tokenizer.decode_batch([tokens], skip_special_tokens=False)
        return str(text)

    def token_strings(self, tokens: list[int]) -> list[str]:
        """Return each token as the vocabulary writes it."""
        return [self.tokenizer.id_to_token(token) or "" for token in tokens]


def load_checkpoint(
    source: str | None, template_file: Path | None, max_model_len: int | None, revision: str | None = None
) -> Checkpoint:
    """Load from a folder, from beside a GGUF file or from the hub; None is the embedded checkpoint. Runs no code of it.

    revision: branch, tag or commit of a hub id.

    Raises:
        InvalidSettingsError: a file is missing or unusable.
    """
    files = _Files(str(EMBEDDED) if source is None else source, revision)
    tokenizer_file = files.required("tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(tokenizer_file.decode())
    except Exception as error:
        # tokenizers raises bare Exceptions for files it can't read.
        raise InvalidSettingsError(f"tokenizer {files.source!r}: tokenizer.json can't be loaded: {error}") from error
    config = files.json("tokenizer_config.json")
    template_source = _find_template(files, config) if template_file is None else _read_template(template_file)
    special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    try:
        template = None if template_source is None else ChatTemplate(template_source, special)
    except InvalidTemplateError as error:
        raise InvalidSettingsError(f"chat template of {files.source!r} can't be compiled: {error}") from error
    digest = hashlib.sha256(tokenizer_file + (template_source or "").encode()).digest()
    context = max_model_len or _context(files, config)
    tokenizer_class = str(config.get("tokenizer_class") or _DEFAULT_CLASS)
    return Checkpoint(files.name, tokenizer, template, context, special, digest, tokenizer_class)


def tokenize(checkpoint: Checkpoint, request: TokenizeRequest, settings: Settings) -> JsonObject:
    """Return the tokens of a prompt, or of a conversation. Raises ApiError."""
    messages = request.messages or []
    if len(messages) > settings.max_messages:
        raise invalid("messages", f"{len(messages)} messages", f"at most {settings.max_messages}")
    if request.messages is None:
        tokens = checkpoint.encode(request.prompt or "", request.add_special_tokens is not False)
    else:
        rendered, special = _rendered(checkpoint, request, settings), bool(request.add_special_tokens)
        if rendered.placeholders:
            tokens = checkpoint.guard.encode(rendered, special)
        else:
            tokens = checkpoint.encode(rendered.text, special)
    strings = checkpoint.token_strings(tokens) if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": checkpoint.context, "tokens": tokens, "token_strs": strings}


def detokenize(checkpoint: Checkpoint, request: DetokenizeRequest) -> JsonObject:
    """Return the text of tokens. Raises ApiError for a token that isn't in the vocabulary."""
    size = checkpoint.tokenizer.get_vocab_size()
    beyond = next((number for number, token in enumerate(request.tokens) if token >= size), None)
    if beyond is not None:
        raise invalid(f"tokens[{beyond}]", request.tokens[beyond], f"below {size}, the size of the vocabulary")
    return {"prompt": checkpoint.decode(request.tokens)}


def tokenizer_info(checkpoint: Checkpoint) -> JsonObject:
    """Return what lm_eval asks for; special tokens and the chat template are null where the checkpoint has none."""
    special: JsonObject = {name: text or None for name, text in checkpoint.special_tokens.items()}
    template = None if checkpoint.template is None else checkpoint.template.source
    return special | {
        "tokenizer_class": checkpoint.tokenizer_class,
        "chat_template": template,
        "max_model_len": checkpoint.context,
    }


def _rendered(checkpoint: Checkpoint, request: TokenizeRequest, settings: Settings) -> RenderedPrompt:
    return render_messages(
        checkpoint.template,
        request.messages or [],
        [template_tool(tool) for tool in request.tools or []],
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        template_kwargs=request.chat_template_kwargs,
        guard=checkpoint.guard if settings.special_tokens == "text" else None,
    )


class _Files:
    """The files of a checkpoint by name."""

    def __init__(self, source: str, revision: str | None) -> None:
        self.source = source
        self._folder = Path(source)
        if self._folder.suffix == ".gguf" and self._folder.is_file():
            self.name, self._folder = self._folder.stem, self._folder.parent
            if self.optional("tokenizer.json") is None:
                raise InvalidSettingsError(
                    f"tokenizer {source!r} is a GGUF file without tokenizer.json beside it; put tokenizer.json and "
                    "tokenizer_config.json there, or set tokenizer to the folder or hub id of the original model"
                )
        elif self._folder.is_dir():
            self.name = self._folder.resolve().name
        else:
            self._folder, self.name = _downloaded(source, revision), source

    def optional(self, name: str) -> bytes | None:
        """Return a file's content, None if the checkpoint has no such file."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidSettingsError(f"tokenizer {self.source!r}: {name} can't be read: {error}") from error

    def required(self, name: str) -> bytes:
        """Return a file's content."""
        content = self.optional(name)
        if content is None:
            raise InvalidSettingsError(f"tokenizer {self.source!r} has no {name}")
        return content

    def json(self, name: str) -> dict[str, object]:
        """Return a file's JSON object, an empty one if there is no such file."""
        content = self.optional(name)
        try:
            values = json.loads(content or "{}")
        except ValueError as error:
            raise InvalidSettingsError(f"tokenizer {self.source!r}: {name} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidSettingsError(f"tokenizer {self.source!r}: {name} has no JSON object")
        return values


def _downloaded(source: str, revision: str | None) -> Path:
    """Return the folder of a hub id's small files: from the hub or, where it is out of reach, from the cache."""
    try:
        # All at once, as the server does: without the hub only a folder tells that the checkpoint lacks a file.
        return Path(snapshot_download(source, revision=revision, allow_patterns=[*_FILES]))
    except Exception as error:
        # huggingface_hub and the transport below it raise errors of their own.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        revision_name = source if revision is None else f"{source} at {revision}"
        raise InvalidSettingsError(f"tokenizer {revision_name!r}: no folder, and not on the hub: {reason}") from error


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettingsError(f"chat_template {str(file)!r} can't be read: {error}") from error


def _find_template(files: _Files, config: dict[str, object]) -> str | None:
    """Return the template: a file of its own, else in tokenizer_config.json, where several may have names."""
    content = files.optional("chat_template.jinja")
    if content is not None:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise InvalidSettingsError(
                f"tokenizer {files.source!r}: chat_template.jinja is not UTF-8: {error}"
            ) from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: object) -> str:
    """Return a special token's text, which older files wrap in an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _context(files: _Files, tokenizer_config: dict[str, object]) -> int:
    context = files.json("config.json").get("max_position_embeddings", tokenizer_config.get("model_max_length"))
    if not isinstance(context, int) or context < 1:
        raise InvalidSettingsError(f"tokenizer {files.source!r} doesn't say how long its context is; set max_model_len")
    return context
