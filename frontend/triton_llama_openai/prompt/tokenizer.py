"""A checkpoint's tokenizer, chat templates and context, as the server describes them; truncation; /tokenize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer

from triton_llama_openai.errors import invalid
from triton_llama_openai.prompt.chat_template import ChatTemplate, InvalidTemplateError, render_messages
from triton_llama_openai.prompt.special_tokens import RenderedPrompt, SpecialTokenGuard
from triton_llama_openai.prompt.tool_use import template_tool
from triton_llama_openai.protocol.prompts import Prompt
from triton_llama_openai.protocol.sampling import SamplingRequest
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from triton_llama_openai.settings import Settings
from triton_llama_openai.triton.description import Description

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class UnusableCheckpointError(Exception):
    """The endpoint's libraries can't load the tokenizer or a chat template that the server describes."""


@dataclass(frozen=True)
class PromptTokenizer:
    """Makes prompts for one checkpoint: its tokenizer with its chat templates, as transformers' tokenizers have both.

    name: the checkpoint's. templates: by name. context: tokens of prompt and completion. special_tokens: bos_token,
    eos_token and others, empty where there is none. tokenizer_class: transformers' name of the tokenizer's class.
    """

    name: str
    backend_tokenizer: Tokenizer
    templates: Mapping[str, ChatTemplate]
    context: int
    special_tokens: Mapping[str, str]
    tokenizer_class: str

    @classmethod
    def of(cls, description: Description, template: str | None) -> PromptTokenizer:
        """Load from a description. template: in place of the checkpoint's own ones. Raises UnusableCheckpointError."""
        try:
            tokenizer = Tokenizer.from_str(description.tokenizer)
        except Exception as error:
            # tokenizers raises bare Exceptions for what it can't read.
            raise UnusableCheckpointError(f"the tokenizer of {description.name} can't be loaded: {error}") from error
        texts = {name: text for name, text in description.special_tokens.items() if isinstance(text, str)}
        special = dict.fromkeys(_SPECIAL_TOKENS, "") | texts
        sources = description.chat_templates if template is None else {"default": template}
        try:
            templates = {name: ChatTemplate(source, special) for name, source in sources.items()}
        except InvalidTemplateError as error:
            raise UnusableCheckpointError(f"a chat template of {description.name} {error}") from error
        context, tokenizer_class = description.max_model_len, description.tokenizer_class
        return cls(description.name, tokenizer, templates, context, special, tokenizer_class)

    def template(self, *, with_tools: bool = False) -> ChatTemplate | None:
        """Return the template of a conversation: for one with tools `tool_use`, if it exists, else `default`."""
        default = self.templates.get("default")
        return self.templates.get("tool_use", default) if with_tools else default

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return a text's tokens. With special tokens, a BOS in the text is doubled, which the server undoes."""
        # Of a batch: only these calls release Python's lock, so that in a thread they stop no event loop.
        (encoded,) = self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def num_tokens(self, text: str) -> int:
        """Return how many tokens a text by itself has."""
        return len(self.encode(text, add_special_tokens=False)) if text else 0

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return a prompt's tokens as the server sees them."""
        if not isinstance(prompt, str):
            return prompt
        return self._without_second_bos(self.encode(prompt, add_special_tokens=True))

    def first_ids(self, prompt: Prompt, count: int) -> list[int]:
        """Return a prompt's first tokens, at most `count`; of a text, the special tokens around it are among them."""
        if not isinstance(prompt, str):
            return prompt[:count]
        (encoded,) = self.backend_tokenizer.encode_batch([prompt], add_special_tokens=False)
        encoded.truncate(max(count - self.backend_tokenizer.num_special_tokens_to_add(is_pair=False), 0))
        return self._without_second_bos(list(self.backend_tokenizer.post_process(encoded).ids))[:count]

    @cached_property
    def guard(self) -> SpecialTokenGuard:
        """Keeps special tokens out of clients' texts."""
        return SpecialTokenGuard(self.backend_tokenizer, "".join(item.turn_text() for item in self.templates.values()))

    def prompt_of(self, rendered: RenderedPrompt) -> Prompt:
        """Return a conversation's prompt: its text, or its tokens where clients' texts have special tokens in them."""
        if not rendered.placeholders:
            return rendered.text
        return self._without_second_bos(self.guard.encode(rendered, add_special_tokens=True))

    def _without_second_bos(self, tokens: list[int]) -> list[int]:
        bos = self.backend_tokenizer.token_to_id(self.special_tokens["bos_token"])
        return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, special ones included."""
        (text,) = self.backend_tokenizer.decode_batch([tokens], skip_special_tokens=False)
        return str(text)


def truncate(request: SamplingRequest, prompts: Sequence[Prompt], tokenizer: PromptTokenizer) -> list[Prompt]:
    """Return the prompts, of longer ones the last tokens, as `truncate_prompt_tokens` says. It tokenizes texts.

    As under vLLM, a BOS that is cut off isn't added again.

    Raises:
        ApiError: the request keeps more tokens than the context has room for.
    """
    count, room = request.truncate_prompt_tokens, tokenizer.context - 1
    if count is None:
        return list(prompts)
    if count > room:
        raise invalid("truncate_prompt_tokens", count, f"-1, or 1 … {room} (max_model_len - 1)")
    if count < 0:
        maximum = request.DEFAULT_MAX_TOKENS if request.max_new_tokens is None else request.max_new_tokens
        new_tokens = maximum or 1
        # With more new tokens than the context has, max_tokens is refused or reduced.
        count = tokenizer.context - new_tokens if new_tokens < tokenizer.context else room
    tokens = [tokenizer.prompt_ids(prompt) for prompt in prompts]
    return [ids[-count:] if len(ids) > count else prompt for ids, prompt in zip(tokens, prompts, strict=True)]


def tokenize(tokenizer: PromptTokenizer, request: TokenizeRequest, settings: Settings) -> JsonObject:
    """Return the answer of /tokenize: the tokens of a prompt, or of a conversation. Raises ApiError."""
    messages = request.messages or []
    if len(messages) > settings.max_messages:
        raise invalid("messages", f"{len(messages)} messages", f"at most {settings.max_messages}")
    if request.messages is None:
        tokens = tokenizer.encode(request.prompt or "", request.add_special_tokens is not False)
    else:
        rendered, special = _rendered(tokenizer, request, settings), bool(request.add_special_tokens)
        if rendered.placeholders:
            tokens = tokenizer.guard.encode(rendered, special)
        else:
            tokens = tokenizer.encode(rendered.text, special)
    strings = None
    if request.return_token_strs:
        strings = [tokenizer.backend_tokenizer.id_to_token(token) or "" for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": tokenizer.context,
        "tokens": tokens,
        "token_strs": strings,
    }


def detokenize(tokenizer: PromptTokenizer, request: DetokenizeRequest) -> JsonObject:
    """Return the answer of /detokenize: the text of tokens. Raises ApiError for one that isn't in the vocabulary."""
    size = tokenizer.backend_tokenizer.get_vocab_size()
    beyond = next((number for number, token in enumerate(request.tokens) if token >= size), None)
    if beyond is not None:
        raise invalid(f"tokens[{beyond}]", request.tokens[beyond], f"below {size}, the size of the vocabulary")
    return {"prompt": tokenizer.decode(request.tokens)}


def tokenizer_info(tokenizer: PromptTokenizer) -> JsonObject:
    """Return the answer of /tokenizer_info, which lm_eval asks for; a text that the checkpoint lacks is null."""
    special: JsonObject = {name: text or None for name, text in tokenizer.special_tokens.items()}
    template = tokenizer.template()
    return special | {
        "tokenizer_class": tokenizer.tokenizer_class,
        "chat_template": None if template is None else template.source,
        "max_model_len": tokenizer.context,
    }


def _rendered(tokenizer: PromptTokenizer, request: TokenizeRequest, settings: Settings) -> RenderedPrompt:
    tools = [template_tool(tool) for tool in request.tools or []]
    return render_messages(
        tokenizer.template(with_tools=bool(tools)),
        request.messages or [],
        tools,
        request,
        guard=tokenizer.guard if settings.special_tokens == "text" else None,
    )
