"""The endpoint's settings, parsed strictly.

The command line overrides the environment's `TRITON_LLAMA_OPENAI_<NAME>`, which overrides the defaults below. An
unknown name or an invalid value raises InvalidSettingsError with the name, the value, its source and the bound.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from triton_llama_openai.errors import from_validation

ENVIRONMENT_PREFIX = "TRITON_LLAMA_OPENAI_"
ToolForm = Literal["hermes", "llama3_json"]
"""How a model writes tool calls (output/tool_calls.py)."""


class InvalidSettingsError(Exception):
    """A setting, or a file that a setting names, can't be used."""


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise PydanticCustomError("not_a_file", "Input should be a file that exists")
    return path


def _collector(text: str) -> str:
    if text != "off" and not _URL.fullmatch(text):
        raise PydanticCustomError("not_a_url", "Input should be off, or a URL such as http://127.0.0.1:4318")
    return text


_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+(?:/[!-~]*)?")


def _one_address(text: str) -> str:
    if "," in text:
        raise PydanticCustomError("several_addresses", "Input should be one address; several Tritons need a proxy")
    return text


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Collector = Annotated[str, AfterValidator(_collector)]
File = Annotated[Path, AfterValidator(_existing_file)]


class ModelSettings(BaseModel):
    """The settings of one served model; an entry of the file `models_file` has them, too."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    triton: Annotated[Text, AfterValidator(_one_address)] = "localhost:8001"
    """gRPC endpoint of Triton, or of a proxy in front of several (docs/openai.md#several-tritons): HOST:PORT, or
    grpcs://HOST:PORT for TLS"""
    triton_metrics: Text | None = None
    """HOST:PORT of Triton's metrics, those of several Tritons with commas between; default: the host of triton and the
    next port, as 8002 is for 8001 (docs/openai.md#metrics)"""
    triton_model: Text = "llama"
    """the model's name in Triton; streams need the config streaming"""
    served_name: Annotated[Text, Field(max_length=256)] | None = None
    """the name that requests give as model; default: that of the checkpoint's folder or GGUF file, or its hub id"""
    chat_template: File | None = None
    """file of a Jinja template, over the checkpoint's own"""
    tool_form: Literal["auto", ToolForm] = "auto"
    """how the model writes tool calls; auto reads it off the chat template"""


class Settings(ModelSettings):
    """Every field is an option of the command line and an environment variable."""

    host: Text = "127.0.0.1"
    """address to listen on; 0.0.0.0 is every IPv4 address of this machine"""
    port: Annotated[int, Field(ge=0, le=65535)] = 9000
    """port to listen on; 0 is any free one, which is printed"""
    models_file: File | None = None
    """JSON list of several models, each with the settings triton to tool_form, of which only triton and triton_metrics
    may be given beside it: they are the defaults of entries without triton"""
    api_keys_file: File | None = None
    """a key a line; without it requests need no key"""
    prefix_cache_shared: Literal["off", "on"] = "off"
    """on: requests of all API keys share cached prefixes; off: only those of the same key
    (docs/openai.md#the-prefix-cache)"""
    allowed_origins: Text | None = None
    """origins of browser pages that may call, with commas between; * is any (CORS). Pages may read the headers
    x-request-id, request-id, x-ignored-parameters and retry-after"""
    lora_updates: Literal["off", "on"] = "off"
    """on: /v1/load_lora_adapter and /v1/unload_lora_adapter load and unload adapters, for every holder of a key where
    there are keys (docs/openai.md#adapters)"""
    openapi: Literal["off", "on"] = "on"
    """on: GET /openapi.json describes paths and fields, to the holders of a key where there are keys"""
    page: Literal["auto", "on", "off"] = "auto"
    """the page at / (docs/openai.md#the-page); auto: on if host is a loopback address. It needs no key, its requests
    need one where there are keys"""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """ignore: fields that no request has are left out and named in the header x-ignored-parameters, misspelled ones,
    too; bad values of known fields and refused ones are still refused"""
    stream_interval_ms: Annotated[int, Field(ge=0, le=1000)] = 20
    """minimum milliseconds between two chunks of a stream; tokens of that time share one; 0 sends every token by
    itself"""
    special_tokens: Literal["text", "allow"] = "text"
    """text: special tokens that the texts of a conversation spell out are text; allow: they are special tokens
    (docs/security.md#special-tokens)"""
    request_timeout: Annotated[int, Field(ge=1, le=86400)] = 600
    """maximum seconds of a request"""
    resume_timeout: Annotated[int, Field(ge=0, le=86400)] = 60
    """seconds that a request without a working Triton waits for one; 0: it ends with an error when its own is lost
    (docs/openai.md#when-a-triton-dies)"""
    grace: Annotated[int, Field(ge=0, le=86400)] = 120
    """seconds that accepted requests have to end after SIGTERM"""
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 4 << 20
    """maximum bytes of a request's body"""
    max_messages: Annotated[int, Field(ge=1, le=1 << 20)] = 2048
    """maximum messages of a conversation, on /tokenize, too; of the Messages API with system and each tool_result"""
    max_prompts: Annotated[int, Field(ge=1, le=1 << 16)] = 128
    """maximum prompts of one completion request"""
    max_requests: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """maximum requests in flight, those whose body is still arriving included; one more is refused with 503"""
    max_connections: Annotated[int, Field(ge=1, le=1 << 20)] = 4096
    """maximum open connections; beyond it every request, of /health, too, is refused with a plain 503"""
    body_timeout: Annotated[int, Field(ge=1, le=3600)] = 30
    """seconds for a request's body to arrive"""
    log_requests: Literal["none", "summary", "prompts"] = "summary"
    """a log line for each POST: summary, prompts (with its prompt), or none"""
    traces: Collector = "off"
    """URL of a collector that takes OTLP over HTTP, for spans of requests (docs/operations.md#traces); needs the extra
    `tracing`"""

    @classmethod
    def parse(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
        """Read the settings from the command line and the environment.

        Raises InvalidSettingsError naming the setting, its value, its source and the bound; SystemExit for --help or an
        unknown option.
        """
        texts, sources = _read(arguments, environment)
        for name, source in sources.items():
            if name not in cls.model_fields:
                nearest = get_close_matches(name, cls.model_fields, 1)
                hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
                known = ", ".join(sorted(cls.model_fields))
                raise InvalidSettingsError(f"{source}: unknown setting{hint}; known are {known}")
        # Those of triton are the defaults of a file's models.
        of_one_model = texts.keys() & ModelSettings.model_fields.keys() - {"triton", "triton_metrics"}
        if "models_file" in texts and of_one_model:
            raise InvalidSettingsError(f"models_file lists the models, so {min(of_one_model)} can't be given as well")
        try:
            return cls.model_validate(texts)
        except ValidationError as error:
            source = sources[str(error.errors()[0]["loc"][0])]
            raise InvalidSettingsError(f"{source}: {from_validation(error)}") from None


def _read(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings' texts and their sources by name."""
    texts, sources = {}, {}
    for variable, text in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            texts[name], sources[name] = text, f"environment variable {variable}"
    for name, text in vars(_option_parser().parse_args(arguments)).items():
        if text is not None:
            texts[name], sources[name] = text, f"option {option(name)}"
    return texts, sources


def option(name: str) -> str:
    """Return the command line's option for a setting."""
    return "--" + name.replace("_", "-")


def _option_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triton-llama-openai",
        description="OpenAI's protocol in front of Triton. Each option is also an environment variable "
        f"{ENVIRONMENT_PREFIX}<NAME>.",
        allow_abbrev=False,
    )
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else f" (default: {field.default})"
        parser.add_argument(option(name), metavar="VALUE", help=f"{field.description}{default}")
    return parser
