"""Loads for drafts: answers of which a part stands in the prompt, in a schema or in the turn before.

docs/benchmarks.md lists the kinds. The model ends its answers itself. Every request has a text of its own, also among a
server's loads, because a server may keep the texts before. Users of the warm-up have from half of a request or a chat
to a whole one, lest all be at the same place of their answers.
"""

from __future__ import annotations

import ast
import math
import random
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from transformers import AutoTokenizer

from perf.load.protocols import Request
from perf.load.workload import Load, lengths, prompts

Kind = Literal["edit", "edit_predicted", "retrieval", "summary", "chat", "json", "tools", "plain"]
KINDS: Sequence[Kind] = get_args(Kind)
MEASURED = {1: 12, 4: 24, 8: 32, 32: 64}
"""Requests or chats after the warm-up, by users."""
SECONDS = 8.0
LINES, CHARACTERS = range(15, 31), range(1000)
"""Of functions to edit. The default model doesn't copy longer ones, or those without a docstring."""
PAGE_TOKENS = 600
TURNS = (
    "Read this passage of Python's documentation:\n\n{}\n\nWhat is it about?",
    "Say that in one sentence.",
    "Which terms of the passage should a beginner know?",
    "Give a short example in Python.",
    "Explain the example line by line.",
    "Change the example so that it prints its result.",
    "Which mistake is common here?",
    "Summarize what you have told me so far.",
)
PROPERTIES = {
    "customer_full_name": {"type": "string", "maxLength": 40},
    "preferred_payment_method": {"enum": ["credit_card", "bank_transfer", "cash_on_delivery"]},
    "requested_delivery_weekday": {"enum": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]},
    "total_number_of_articles": {"type": "integer", "minimum": 1, "maximum": 999},
    "is_express_delivery": {"type": "boolean"},
    "ordered_article_names": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
}
ORDER = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}


def load(kind: Kind, users: int) -> Load:
    """Return a load of requests or chats of a kind."""

    def chosen(checkpoint: Path) -> tuple[list[Request], int]:
        first = sum(fewer + MEASURED[fewer] for fewer in MEASURED if fewer < users)
        chats = [chat(kind, checkpoint, number) for number in range(first, first + users + MEASURED[users])]
        parts = [_begun(each, (1 + user / users) / 2) for user, each in enumerate(chats[:users], 1)]
        warmup = [request for part in parts for request in part]
        return [*warmup, *(request for each in chats[users:] for request in each)], len(warmup)

    return Load(f"drafts/{kind}/{users}", kind, users, chosen, SECONDS)


def chat(kind: Kind, checkpoint: Path, number: int) -> list[Request]:
    """Return a request of a kind, or the turns of a chat; 0 <= number < 177."""
    if kind == "chat":
        passage = _passages(checkpoint, 1000)[-1 - number]
        return [replace(_request(text.format(passage), 80), turn=turn) for turn, text in enumerate(TURNS, 1)]
    return [_single(kind, checkpoint, number)]


def _single(kind: Kind, checkpoint: Path, number: int) -> Request:
    if kind in ("edit", "edit_predicted"):
        text, variable = _functions()[2 * number + (kind == "edit_predicted")]
        task = f"Repeat this Python function, with the variable {variable} renamed to {variable}_2."
        tokens = len(_tokenizer(checkpoint)(text)["input_ids"])
        predicted = {"prediction": {"type": "content", "content": text}} if kind == "edit_predicted" else {}
        return _request(f"{task}\n\n```python\n{text}\n```", math.ceil(1.1 * tokens), **predicted)
    if kind == "json":
        form = {"type": "json_schema", "json_schema": {"name": "order", "strict": True, "schema": ORDER}}
        return _request(f"Write this order as JSON. {_order(number)}", 250, response_format=form)
    if kind == "tools":
        tool = {"type": "function", "function": {"name": "place_order", "parameters": ORDER}}
        fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        return _request(f"Place this order. {_order(1000 + number)}", 250, **fields)
    if kind == "plain":
        return _request(_passages(checkpoint, 1000)[number], lengths("uniform", 512)[number])
    page = _passages(checkpoint, 180, PAGE_TOKENS)[number]
    if kind == "summary":
        return _request(f"Summarize this page of Python's documentation in a few sentences.\n\n{page}", 120)
    paragraph = page.split("\n\n")[page.count("\n\n") // 2]
    return _request(f'Page:\n{page}\n\nQuote the text from "{" ".join(paragraph.split()[:5])}" on.', 100)


_passages = cache(prompts)
_tokenizer = cache(AutoTokenizer.from_pretrained)


@cache
def _functions() -> list[tuple[str, str]]:
    """Return functions of the running interpreter's library, and of each its most frequent variable, shuffled."""
    variables: dict[str, str] = {}
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        source = file.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
                continue
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            names = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
            assigned = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            if assigned and text.count("\n") + 1 in LINES and len(text) in CHARACTERS:
                counts = Counter(name.id for name in names if name.id in assigned)
                variables[text] = counts.most_common(1)[0][0]
    functions = [*variables.items()]
    random.Random(0).shuffle(functions)
    return functions


def _order(number: int) -> str:
    draw = random.Random(number)
    name = draw.choice(("Ada Keller", "Bela Novak", "Chen Silva", "Dora Berg", "Emil Costa", "Fatima Horn"))
    city, day = draw.choice(("Lisbon", "Oslo", "Prague", "Vienna")), draw.choice(("Monday", "Tuesday", "Friday"))
    articles = ", ".join(draw.sample(("lamp", "garden chair", "bookshelf", "kettle", "carpet", "mirror"), 3))
    payment = draw.choice(("credit card", "bank transfer", "cash on delivery"))
    return (
        f"Order {number}: {name} from {city} wants {draw.randint(2, 90)} articles ({articles}) by express on {day}, "
        f"and pays by {payment}."
    )


def _request(prompt: str, max_tokens: int, **fields: object) -> Request:
    return Request(prompt, 0, fields={"max_tokens": max_tokens, **fields})


def _begun(turns: Sequence[Request], share: float) -> list[Request]:
    """Return the first turns of a chat, or a request for a part of its tokens."""
    if len(turns) > 1:
        return [*turns[: math.ceil(share * len(turns))]]
    fields = turns[0].fields
    tokens = math.ceil(share * int(str(fields["max_tokens"])))
    return [replace(turns[0], fields={**fields, "max_tokens": tokens})]
