"""The endpoint's settings: one frozen dataclass, parsed strictly.

The command line overrides the environment's `TRITON_LLAMA_OPENAI_<NAME>`, which overrides the defaults below. An
unknown name or an invalid value raises InvalidSettingsError with the name, the value, its source and the bound.
"""

from __future__ import annotations

import argparse
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

ENVIRONMENT_PREFIX = "TRITON_LLAMA_OPENAI_"


class InvalidSettingsError(Exception):
    """A setting, a file that a setting names, or a checkpoint can't be used."""


@dataclass(frozen=True)
class Bound(ABC):
    """What a setting means, and which values it may have."""

    meaning: str

    @abstractmethod
    def parse(self, text: str) -> object:
        """Return the value, or raise ValueError with the bound."""


@dataclass(frozen=True)
class Choice(Bound):
    """One of a fixed set of words."""

    words: tuple[str, ...]

    def parse(self, text: str) -> str:
        """Return the word, or raise ValueError with the bound."""
        if text not in self.words:
            raise ValueError(f"must be one of {', '.join(self.words)}")
        return text


@dataclass(frozen=True)
class Integer(Bound):
    """An integer in [low, high]."""

    low: int
    high: int

    def parse(self, text: str) -> int:
        """Return the integer, or raise ValueError with the bound."""
        # int() also accepts "1_000" and " 7 ", which are more likely mistakes.
        if not re.fullmatch(r"[0-9]{1,18}", text) or not self.low <= int(text) <= self.high:
            raise ValueError(f"must be a whole number from {self.low} to {self.high}")
        return int(text)


@dataclass(frozen=True)
class Text(Bound):
    """A non-empty string."""

    def parse(self, text: str) -> str:
        """Return the string without the blanks around it, or raise ValueError."""
        if not text.strip():
            raise ValueError("must not be empty")
        return text.strip()


@dataclass(frozen=True)
class File(Bound):
    """A path of a file that exists."""

    def parse(self, text: str) -> Path:
        """Return the path, or raise ValueError."""
        path = Path(text)
        if not text.strip() or not path.is_file():
            raise ValueError("must be a file that exists")
        return path


@dataclass(frozen=True)
class Settings:
    """Every field is an option of the command line and an environment variable."""

    host: str = "127.0.0.1"
    port: int = 9000
    triton: str = "localhost:8001"
    model: str = "llama"
    tokenizer: str | None = None
    revision: str | None = None
    served_name: str | None = None
    chat_template: Path | None = None
    tool_form: str = "auto"
    max_model_len: int | None = None
    models_file: Path | None = None
    api_keys_file: Path | None = None
    allowed_origins: str | None = None
    stream_interval_ms: int = 20
    request_timeout: int = 600
    grace: int = 120
    max_body_bytes: int = 4 << 20
    max_messages: int = 2048
    max_prompts: int = 128
    max_requests: int = 1024
    max_connections: int = 4096
    body_timeout: int = 30
    log_requests: str = "summary"

    @classmethod
    def parse(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
        """Read the settings from the command line and the environment.

        Raises InvalidSettingsError naming the setting, its value, its source and the bound; SystemExit for --help or an
        unknown option.
        """
        given = {
            key.removeprefix(ENVIRONMENT_PREFIX).lower(): (f"environment variable {key}", value)
            for key, value in environment.items()
            if key.startswith(ENVIRONMENT_PREFIX)
        }
        options = _option_parser().parse_args(arguments)
        given |= {name: (f"option {option(name)}", text) for name, text in vars(options).items() if text is not None}
        values: dict[str, object] = {}
        for name, (source, text) in given.items():
            if name not in BOUNDS:
                near = get_close_matches(name, BOUNDS, 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise InvalidSettingsError(f"{source}: unknown setting{hint}; known are {', '.join(sorted(BOUNDS))}")
            values[name] = _value(name, source, text)
        if "models_file" in values and (both := sorted(values.keys() & _ONE_MODEL)):
            raise InvalidSettingsError(f"models_file lists the models, so {both[0]} can't be given as well")
        if "models_file" not in values:
            values = {**_of_the_server(environment, values), **values}
        return cls(**values)  # type: ignore[arg-type]  # BOUNDS parsed each value to its field's type


BOUNDS: Mapping[str, Bound] = {
    "host": Text("address to listen on; 0.0.0.0 is every IPv4 address of this machine"),
    "port": Integer("port to listen on; 0 is any free one, which is printed", 0, 65535),
    "triton": Text("Triton's gRPC endpoint: HOST:PORT, or grpcs://HOST:PORT for TLS"),
    "model": Text("the model's name in Triton; it must be loaded under the config streaming"),
    "tokenizer": Text(
        "folder or hub id of the served checkpoint, for its tokenizer, chat template and context; default: the "
        "server's LLAMA_MODEL, else the embedded checkpoint"
    ),
    "revision": Text(
        "branch, tag or commit of a hub id; default: the server's LLAMA_REVISION where the tokenizer is its "
        "LLAMA_MODEL, else the default branch"
    ),
    "served_name": Text("the name that requests give as model; default: the folder's name or the hub id"),
    "chat_template": File("file of a Jinja template, over the checkpoint's own"),
    "tool_form": Choice(
        "how the model writes tool calls; auto reads it off the chat template", ("auto", "hermes", "llama3_json")
    ),
    "max_model_len": Integer(
        "the server's; default: its LLAMA_MAX_MODEL_LEN, else the checkpoint's context, at most 4096", 2, 1 << 20
    ),
    "models_file": File(
        "JSON list of several models, each with the eight settings above (docs/openai.md); triton is the default "
        "of theirs"
    ),
    "api_keys_file": File("a key a line; without it no key is asked for"),
    "allowed_origins": Text("origins of browser pages that may call, with commas between; * is any (CORS)"),
    "stream_interval_ms": Integer(
        "milliseconds between two chunks of a stream at least; tokens of that time share one", 0, 1000
    ),
    "request_timeout": Integer("seconds of a request at most", 1, 86400),
    "grace": Integer("seconds that accepted requests have to end after SIGTERM", 0, 86400),
    "max_body_bytes": Integer("bytes of a request's body at most", 1024, 1 << 30),
    "max_messages": Integer("messages of a conversation at most", 1, 1 << 20),
    "max_prompts": Integer("prompts of one completion request at most", 1, 1 << 16),
    "max_requests": Integer("requests in flight at most; one more is refused with 503", 1, 1 << 20),
    "max_connections": Integer(
        "open connections at most; one more is answered about health and metrics only, else with 503", 1, 1 << 20
    ),
    "body_timeout": Integer("seconds for a request's headers to arrive, and again for its body", 1, 3600),
    "log_requests": Choice(
        "a log line for each request: summary, prompts (with its prompt), or none", ("none", "summary", "prompts")
    ),
}

_ONE_MODEL = {"model", "tokenizer", "revision", "served_name", "chat_template", "tool_form", "max_model_len"}
"""The settings of one model; `triton` is one of the models of a file too, as their default."""


def _of_the_server(environment: Mapping[str, str], given: Mapping[str, object]) -> dict[str, object]:
    """Return what the server's own variables, where they are set here too, say about its checkpoint."""
    variables = {"tokenizer": "LLAMA_MODEL", "max_model_len": "LLAMA_MAX_MODEL_LEN"}
    # Another tokenizer has revisions of its own.
    if given.get("tokenizer") in (None, environment.get("LLAMA_MODEL")):
        variables["revision"] = "LLAMA_REVISION"
    return {
        name: _value(name, f"environment variable {variable}", text)
        for name, variable in variables.items()
        if (text := environment.get(variable))
    }


def _value(name: str, source: str, text: str) -> object:
    try:
        return BOUNDS[name].parse(text)
    except ValueError as error:
        raise InvalidSettingsError(f"{source}: {name} {error}, got {text!r}") from None


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
    for name in BOUNDS:
        default = getattr(Settings, name)
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(option(name), metavar="VALUE", help=BOUNDS[name].meaning + shown)
    return parser
