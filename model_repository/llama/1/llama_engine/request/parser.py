"""Parses raw inputs into validated requests.

The table in `request.parameters` has the bounds of single parameters. This module checks the bounds that depend on the
server, the tokenizer or two parameters. The caller checks whether the Triton config allows `stream`. A violation raises
InvalidRequest, which names the parameter, the value and the bound.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice

from llama_engine.bounds import BoundError
from llama_engine.errors import ContextExceeded, InvalidRequest, OtherModel
from llama_engine.request.adapter_choice import Adapter, requested_adapter
from llama_engine.request.collection_bounds import read_object
from llama_engine.request.defaults import GenerationDefaults
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.request.parameters import (
    BESIDE_EMBEDDING,
    DESCRIPTION,
    GUIDE_TYPES,
    LORA_PATH,
    MAX_COMPLETIONS,
)
from llama_engine.request.raw_values import RawElement, RawInputs, RequestValues, raw_elements
from llama_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class RequestParser:
    """Parses raw inputs with one server's limits and defaults.

    max_model_len: maximum tokens of prompt + completion. truncate_max_tokens: default of the request parameter: whether
    a max_tokens that doesn't fit is reduced instead of refused. digest: of the model's description. adapters: returns
    the loaded ones. generates: whether the model gives completions. embeds: whether it gives embeddings.
    """

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    max_model_len: int
    _: KW_ONLY
    truncate_max_tokens: bool = False
    digest: str = ""
    adapters: Callable[[], Sequence[Adapter]] = tuple
    generates: bool = True
    embeds: bool = False

    def parse(self, inputs: RawInputs, values: RequestValues | None = None) -> list[GenerationRequest]:
        """Return one request per batch element. Raises InvalidRequest for the first violation of a bound.

        values: Triton's request parameters; each is treated as an input of the same name in every batch element. Raises
        OtherModel for a request prepared by another description, whose values may violate this model's bounds.
        """
        elements = raw_elements(inputs, values or {})
        if any(element.read(DESCRIPTION) not in ("", self.digest) for element in elements if DESCRIPTION in element):
            raise OtherModel(f"another model is served than the one of the request's {DESCRIPTION}")
        requests = [self._parse_element(element) for element in elements]
        # The limit applies to n > 1 only: Triton's max_batch_size bounds the batch size.
        count, limit = sum(request.n for request in requests), max(MAX_COMPLETIONS, len(elements))
        if count > limit:
            (name, *_) = (element.raw["n"].name for element in elements if "n" in element)
            raise InvalidRequest(f"{name} is {count} in all of the request; it must be at most {limit} in all")
        return requests

    def parse_digest(self, inputs: RawInputs, values: RequestValues | None = None) -> str:
        """Return the digest in a request for the model's description. Raises InvalidRequest beside other inputs."""
        elements = raw_elements(inputs, values or {})
        if others := sorted({raw.name for element in elements for raw in element.raw.values()} - {DESCRIPTION}):
            raise InvalidRequest(f"{others[0]} is given beside {DESCRIPTION}, which has no other input")
        if len(elements) > 1:
            raise InvalidRequest(f"{DESCRIPTION} is given in a batch of {len(elements)}; it must be the only one")
        return str(elements[0].read(DESCRIPTION))

    def _parse_element(self, element: RawElement) -> GenerationRequest:
        if LORA_PATH in element:
            raise InvalidRequest(f"{element.prefix}{LORA_PATH} is given beside a prompt; one of them must be missing")
        prompt, tokens = self._prompt(element)
        values = {"seed": secrets.randbits(64), **self.defaults.values, **element.values()}
        request = GenerationRequest(prompt, tokens, **values)  # type: ignore[arg-type]  # bounds give the fields' types
        if request.return_embedding:
            return self._embedding_request(request, element)
        if not self.generates:
            bound = "true: the checkpoint has no output head (lm_head), and serves embeddings alone"
            raise element.refusal("return_embedding", "false or missing", bound)
        request = self._with_lengths(request, element)
        if request.top_p == 0:
            # TensorRT-LLM's clients send top_p 0 for greedy decoding.
            request = replace(request, temperature=0.0, top_p=1.0)
        _check_guide(request, element)
        self._check_resumption(request, element)
        self._check_tokens(element, "stop_token_ids", request.stop_token_ids)
        self._check_tokens(element, "allowed_token_ids", request.allowed_token_ids)
        self._check_tokens(element, "logit_bias", (token for token, _ in request.logit_bias))
        end = self._end_tokens(request, element)
        stop_token_ids = tuple(dict.fromkeys((*request.stop_token_ids, *end)))
        biases = {**dict(self._biases(request, element)), **dict.fromkeys(self.defaults.suppressed, -math.inf)}
        return replace(
            request,
            logit_bias=tuple(biases.items()),
            stop_token_ids=stop_token_ids,
            prediction_tokens=self._prediction_tokens(request),
            adapter=requested_adapter(request, element, self.adapters()),
        )

    def _embedding_request(self, request: GenerationRequest, element: RawElement) -> GenerationRequest:
        """Return a request for an embedding, which generates no token. Refuses it beside parameters of a completion."""
        if not self.embeds:
            bound = "false: the setting pooling is off, or auto and the checkpoint has no pooling of its own"
            raise element.refusal("return_embedding", "true", bound)
        if others := sorted(element.raw.keys() - BESIDE_EMBEDDING):
            raise element.refusal(others[0], "given", "missing beside return_embedding, which generates nothing")
        return replace(
            request, max_tokens=0, min_tokens=0, adapter=requested_adapter(request, element, self.adapters())
        )

    def _prompt(self, element: RawElement) -> tuple[str, tuple[int, ...]]:
        """Return the prompt as text and as tokens."""
        if "input_ids" in element:
            tokens = element.read("input_ids")
            assert isinstance(tokens, tuple)
            self._check_prompt(element, "input_ids", tokens)
            token_bytes = self.tokenizer.vocabulary.token_bytes
            return b"".join(token_bytes[token] for token in tokens).decode(errors="replace"), tokens
        text = element.read("text_input")
        assert isinstance(text, str)
        # Refuse a prompt too long for even the longest tokens before spending time on tokenization.
        size = len(text.encode())
        if size > self._max_prompt * self.tokenizer.vocabulary.longest:
            raise self._prompt_too_long(element, "text_input", f"a text of {size} bytes")
        tokens = self.tokenizer.encode(text) if text else ()
        self._check_prompt(element, "text_input", tokens)
        return text, tokens

    def _check_prompt(self, element: RawElement, name: str, tokens: tuple[int, ...]) -> None:
        if not tokens:
            raise element.refusal(name, "empty", "a prompt of at least one token")
        if len(tokens) > self._max_prompt:
            raise self._prompt_too_long(element, name, f"{len(tokens)} tokens")
        self._check_tokens(element, name, tokens)

    def _with_lengths(self, request: GenerationRequest, element: RawElement) -> GenerationRequest:
        """Return the request with max_tokens and min_tokens limited to max_model_len - prompt tokens."""
        size = len(request.prompt_tokens)
        room = self.max_model_len - size
        truncates = request.truncate_max_tokens
        if truncates is None:
            truncates = self.truncate_max_tokens
        # A default max_tokens is always reduced to the room.
        if request.max_tokens > room and "max_tokens" in element and not truncates:
            bound = (
                f"at most {room}: the prompt has {size} tokens, "
                f"and prompt and completion together may have {self.max_model_len}; {self._context_length}"
            )
            raise element.refusal("max_tokens", request.max_tokens, bound, ContextExceeded)
        max_tokens = min(request.max_tokens, room)
        if request.min_tokens > max_tokens and "min_tokens" in element:
            raise element.refusal(
                "min_tokens", request.min_tokens, f"a whole number, at least 0 and at most {max_tokens}"
            )
        return replace(request, max_tokens=max_tokens, min_tokens=min(request.min_tokens, max_tokens))

    def _prediction_tokens(self, request: GenerationRequest) -> tuple[int, ...]:
        if not request.prediction:
            return ()
        # Text beyond max_tokens of the longest tokens is not tokenized.
        text = request.prediction[: request.max_tokens * self.tokenizer.vocabulary.longest]
        # A tokenizer can have ids that the model does not have.
        tokens = (token for token in self.tokenizer.encode_inside(text) if token < self._vocabulary)
        return tuple(islice(tokens, request.max_tokens))

    def _check_resumption(self, request: GenerationRequest, element: RawElement) -> None:
        """Refuse `resume_ids` that leave nothing to generate, or that don't determine how the text continues."""
        count = len(request.resume_ids)
        if not count:
            return
        self._check_tokens(element, "resume_ids", request.resume_ids)
        if count >= request.max_tokens:
            bound = f"fewer than max_tokens, which is {request.max_tokens}"
            raise element.refusal("resume_ids", f"a list of {count} tokens", bound)
        if request.n > 1:
            raise element.refusal("n", request.n, "1 beside resume_ids, which are the tokens of one completion")
        if request.temperature > 0 and "seed" not in element:
            raise element.refusal(
                "seed", "missing", "the interrupted request's beside resume_ids, if temperature is not 0"
            )

    def _biases(self, request: GenerationRequest, element: RawElement) -> tuple[tuple[int, float], ...]:
        """Return pairs (token id, bias): logit_bias, plus the weights of embedding_bias_words.

        A word's weight is added once to each distinct token of the word. Raises InvalidRequest if the two lists
        differ in length.
        """
        words, weights = request.embedding_bias_words, request.embedding_bias_weights
        if len(weights) != len(words):
            bound = f"as long as embedding_bias_words, which is a list of {len(words)} words"
            raise element.refusal("embedding_bias_weights", f"a list of {len(weights)} numbers", bound)
        if not words:
            return request.logit_bias
        biases: defaultdict[int, float] = defaultdict(float, request.logit_bias)
        for word, weight in zip(words, weights, strict=True):
            for token in set(self.tokenizer.encode_inside(word.decode())):
                biases[token] += weight
        return tuple(biases.items())

    def _end_tokens(self, request: GenerationRequest, element: RawElement) -> tuple[int, ...]:
        """Return the token of the parameter `end_id`, which TensorRT-LLM's clients send, or no token."""
        token = request.end_id
        if token >= self._vocabulary:
            raise element.refusal("end_id", token, f"a token id, at most {self._vocabulary - 1}, or -1 for none")
        return () if token < 0 else (token,)

    def _check_tokens(self, element: RawElement, name: str, tokens: Iterable[int]) -> None:
        beyond = next((token for token in tokens if token >= self._vocabulary), None)
        if beyond is not None:
            raise element.refusal(name, f"a list with token {beyond}", f"of tokens from 0 to {self._vocabulary - 1}")

    @property
    def _max_prompt(self) -> int:
        return self.max_model_len - 1

    def _prompt_too_long(self, element: RawElement, name: str, value: str) -> InvalidRequest:
        bound = f"at most {self._max_prompt} tokens (max_model_len - 1)"
        return element.refusal(name, value, f"{bound}; the prompt is too long: {self._context_length}", ContextExceeded)

    @property
    def _context_length(self) -> str:
        """The words of hosted services, for which LiteLLM, LangChain and AIPerf search messages."""
        return f"this model's maximum context length is {self.max_model_len} tokens"

    @property
    def _vocabulary(self) -> int:
        return len(self.tokenizer.vocabulary.token_bytes)


def _check_guide(request: GenerationRequest, element: RawElement) -> None:
    """Refuse a guide without a type, and a type other than `json` without a guide."""
    kind, guide = request.guided_decoding_guide_type, request.guided_decoding_guide
    if guide and not kind:
        types = ", ".join(GUIDE_TYPES)
        raise element.refusal("guided_decoding_guide_type", "missing", f"one of {types} beside guided_decoding_guide")
    if kind and kind != "json" and not guide:
        raise element.refusal("guided_decoding_guide", "missing", f"given with guided_decoding_guide_type {kind!r}")
    if kind == "json" and guide:
        try:
            read_object(guide)
        except BoundError as error:
            raise element.refusal(
                "guided_decoding_guide", error.value, "missing or a JSON object beside 'json'"
            ) from None
