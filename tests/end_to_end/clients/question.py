"""What the libraries' checks ask, and the form that they ask an answer or a call to have."""

from typing import Literal

from pydantic import BaseModel

MODEL = "pydoc-llama"
QUESTION = "What is a list?"


class Topic(BaseModel):
    """What a question is about."""

    kind: Literal["list", "dict"]
    urgent: bool


def look_up(kind: Literal["list", "dict"]) -> str:
    """Look a kind up."""
    return f"found {kind}"
