"""Receipts: what determines a completion's tokens, and the tokens, under one hash.

On a path whose bits depend on the request alone, anyone with the checkpoint can verify a receipt: computed again with
the same settings, it gives the same tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llama_engine.api.compound_bounds import TokenBias, TokenIds, read_object
from llama_engine.api.generation_request import GenerationRequest
from llama_engine.api.origin import Origin
from llama_engine.api.parameters import MAX_BIASES, PARAMETERS
from llama_engine.bounds import Bound, BoundError, Integer, Real, Text, decode, show

_NAMES = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "allowed_token_ids", "stop_words", "stop_token_ids"),
    *("ignore_eos", "bad_words", "guided_decoding_guide_type", "guided_decoding_guide"),
)
"""The parameters that determine tokens, besides prompt and seed."""

_TOKENS = TokenIds()
_BIAS = 100.0 * (MAX_BIASES + 1)
# Parsing has added other parameters to these: embedding_bias_words and end_id.
_BOUNDS: Mapping[str, Bound[object]] = {
    **{name: PARAMETERS[name].bound for name in _NAMES},
    "logit_bias": TokenBias(PARAMETERS["allowed_token_ids"].bound.limit, Real(-_BIAS, _BIAS)),  # type: ignore[attr-defined]
    "stop_token_ids": _TOKENS,
}


@dataclass(frozen=True)
class Receipt:
    """A receipt of one completion. parameters: by name, as JSON has them. seed: a decimal number, which JSON can hold.

    Floats are those that the server has parsed, so that a JSON library that writes 1 for 1.0 changes no hash.
    """

    contract: int
    checkpoint: str
    settings: Mapping[str, str]
    prompt_ids: Sequence[int]
    parameters: Mapping[str, object]
    seed: str
    output_ids: Sequence[int]

    @classmethod
    def of(cls, request: GenerationRequest, output_ids: Sequence[int], origin: Origin) -> Receipt:
        """Return the receipt of a finished completion."""
        parameters = {name: _as_json(name, getattr(request, name)) for name in _NAMES}
        return cls(**vars(origin), prompt_ids=request.prompt_tokens, parameters=parameters, seed=str(request.seed),
                   output_ids=output_ids)  # fmt: skip

    @classmethod
    def parse(cls, text: object) -> Receipt:
        """Return the receipt in a JSON object. Raises BoundError if it is malformed, or if its hash is another."""
        content = dict(read_object(text))
        hash_ = content.pop("hash", None)
        if unlike := content.keys() ^ _FIELDS.keys():
            raise BoundError(f"an object with {show(min(unlike))} missing or unknown", "a receipt")
        values = {}
        for name, bound in _FIELDS.items():
            try:
                values[name] = bound.parse(content[name])
            except BoundError as error:
                raise BoundError(f"an object whose {name} is {error.value}", f"a receipt: {error.bound}") from None
        receipt = cls(**values)  # type: ignore[arg-type]  # bounds give the fields' types
        if hash_ != receipt.hash:
            raise BoundError(f"an object of the hash {show(hash_)}", f"unchanged: its content has {receipt.hash}")
        return receipt

    def request(self) -> GenerationRequest:
        """Return the request of the receipt; its bounds across parameters are not checked."""
        values = {name: bound.parse(self.parameters[name]) for name, bound in _BOUNDS.items()}
        # Of a smaller max_tokens the text would end elsewhere.
        values |= {"seed": int(self.seed), "truncate_max_tokens": False}
        return GenerationRequest("", tuple(self.prompt_ids), **values)  # type: ignore[arg-type]  # bounds give the types

    @property
    def hash(self) -> str:
        """SHA-256 of all other fields as JSON with sorted keys and no spaces, in hexadecimal."""
        content = json.dumps(vars(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def origin(self) -> Origin:
        """The server's side of the receipt."""
        return Origin(self.checkpoint, self.settings, self.contract)

    def to_json(self) -> str:
        """Return the receipt as JSON."""
        return json.dumps({**vars(self), "hash": self.hash}, ensure_ascii=False)


class _Texts:
    """A JSON object of texts."""

    description = "an object of texts"

    def parse(self, value: object) -> Mapping[str, str]:
        if not isinstance(value, dict):
            raise BoundError(show(value), self.description)
        return {decode(name): decode(text) for name, text in value.items()}


class _Seed:
    """A seed as text."""

    description = f"a text: {PARAMETERS['seed'].bound.description}"

    def parse(self, value: object) -> str:
        if not isinstance(value, str):
            raise BoundError(show(value), self.description)
        return str(PARAMETERS["seed"].bound.parse(value))


class _Parameters:
    """A JSON object with the parameters that determine tokens."""

    description = "an object of parameters"

    def parse(self, value: object) -> Mapping[str, object]:
        if not isinstance(value, dict):
            raise BoundError(show(value), self.description)
        if unlike := value.keys() ^ set(_NAMES):
            raise BoundError(f"an object with {show(min(unlike))} missing or unknown", self.description)
        parsed = {}
        for name, bound in _BOUNDS.items():
            try:
                parsed[name] = _as_json(name, bound.parse(value[name]))
            except BoundError as error:
                raise BoundError(f"an object whose {name} is {error.value}", error.bound) from None
        return parsed


_FIELDS: Mapping[str, Bound[object]] = {
    "contract": Integer(low=1),
    "checkpoint": Text(),
    "settings": _Texts(),
    "parameters": _Parameters(),
    "prompt_ids": _TOKENS,
    "seed": _Seed(),
    "output_ids": _TOKENS,
}


def _as_json(name: str, value: object) -> object:
    """Return a parameter's value as JSON has it."""
    if name == "logit_bias":
        assert isinstance(value, tuple)
        return {str(token): bias + 0.0 for token, bias in value}
    if isinstance(value, float):
        # JavaScript writes -0.0 as 0.
        return value + 0.0
    if isinstance(value, tuple):
        return [item.decode() if isinstance(item, bytes) else item for item in value]
    return value
