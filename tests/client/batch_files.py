"""The files of a batch: lines of requests to write, lines of answers to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]

BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
}


def line(custom_id: str = "a", url: str = "/v1/completions", **fields: object) -> Json:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**BODIES[url], **fields}}


def write(*lines: object, path: str = "IN.jsonl") -> None:
    Path(path).write_text("".join(text if isinstance(text, str) else json.dumps(text) + "\n" for text in lines))


def read(path: str = "OUT.jsonl") -> dict[str, Json]:
    """Return the lines of a file by their custom_id, of which each is there once."""
    lines = [json.loads(text) for text in Path(path).read_text().splitlines()]
    assert len({answer["custom_id"] for answer in lines}) == len(lines)
    return {answer["custom_id"]: answer for answer in lines}
