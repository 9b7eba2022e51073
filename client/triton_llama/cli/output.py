"""How completions and errors are written: plain, or one JSON object a line."""

from __future__ import annotations

import json
from dataclasses import asdict

from triton_llama.completion import AsyncCompletionStream, Completion, Piece
from triton_llama.errors import TritonLlamaError


def as_json(completion: Completion) -> str:
    """A completion as one line of JSON, all of its fields."""
    return json.dumps(asdict(completion), ensure_ascii=False)


def piece_as_json(piece: Piece, stream: AsyncCompletionStream) -> str:
    """A piece as one line of JSON: its fields, and those of a completion that are the same for all of its pieces."""
    common = {"request_id": stream.request_id, "seed": stream.seed}
    return json.dumps({**asdict(piece), **common}, ensure_ascii=False)


def outcome_as_json(line: int, result: Completion | TritonLlamaError) -> str:
    """A completion's fields, or `error` with `type` and `message`, each with the prompt's `line` in its file."""
    if isinstance(result, TritonLlamaError):
        error = {"type": type(result).__name__, "message": str(result)}
        return json.dumps({"line": line, "error": error}, ensure_ascii=False)
    return json.dumps({"line": line, **asdict(result)}, ensure_ascii=False)


def on_one_line(text: str) -> str:
    r"""A text with its line breaks as `\n` and `\r`, and its backslashes doubled so that this can be undone."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
