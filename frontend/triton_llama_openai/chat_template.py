"""A checkpoint's chat template, rendered in jinja's sandbox with the helpers that transformers gives templates.

jinja's sandbox keeps a template from Python's inside. Here its time is bounded too, for one that never ends would
stop the whole endpoint: loops and macros look at the clock, and products and powers at their size.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import NoReturn

from jinja2 import Template, TemplateError, meta
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, ExprStmt, For, Node
from jinja2.nodes import Macro as MacroBlock
from jinja2.nodes import Template as TemplateTree
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from triton_llama_openai.errors import ApiError

Turn = dict[str, object]
"""A message as templates read it: role, content, and a tool call's arguments as an object."""

RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
"""Variables that `chat_template_kwargs` can't set."""


_RENDERING = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError),
)
"""What a template can raise about messages that it wasn't written for."""

LONGEST_RENDERING_S = 2.0
_LONGEST_PRODUCT = 1 << 22
"""Characters or elements of a product of a sequence, bits of one of integers."""

_deadline: ContextVar[float] = ContextVar("deadline")
"""When the template that is being rendered has to be done, in monotonic seconds."""

_END = "END_OF_THE_LAST_MESSAGE"
"""Marks where a message that is continued ends; the template may trim the blanks before it."""


class InvalidTemplateError(Exception):
    """A template can't be compiled."""


class ChatTemplate:
    """One compiled template. special_tokens: variables such as bos_token."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Clock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["namespace"] = _Namespace
        try:
            tree = environment.parse(source)
            variables = meta.find_undeclared_variables(tree)
            self._template = environment.compile_with_clock(tree)
        except TemplateError as error:
            raise InvalidTemplateError(_first_line(error)) from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.takes_tools = "tools" in variables

    def render(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Turn] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt. variables: more of the template's own, from the request.

        Raises:
            ApiError: the template refuses these messages, or has a fault that they bring out.
        """
        _deadline.set(time.monotonic() + LONGEST_RENDERING_S)
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": list(turns),
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _RENDERING as error:
            reason = _first_line(error)
            raise ApiError(
                400, f"messages can't be rendered: the chat template says: {reason}", "messages", "invalid_value"
            ) from error

    def render_open(self, turns: Sequence[Turn], tools: Sequence[Turn] | None, variables: Mapping[str, object]) -> str:
        """Return the prompt that ends with the last message's content, for the model to continue it."""
        last = {**turns[-1], "content": f"{turns[-1]['content']}{_END}"}
        prompt = self.render([*turns[:-1], last], tools, add_generation_prompt=False, variables=variables)
        end = prompt.rfind(_END)
        if end < 0:
            message = "continue_final_message is true; it must be false: the template doesn't show the last message"
            raise ApiError(400, message, "continue_final_message", "invalid_value")
        return prompt[:end]


class _Generation(Extension):
    """transformers' block `{% generation %}`, which marks the assistant's text for training: rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  jinja's declaration

    def parse(self, parser: Parser) -> Node:
        """Return the block's nodes."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_plain"), [], [], body).set_lineno(line)

    def _plain(self, caller: Macro) -> str:
        return str(caller())


class _Clock(Extension):
    """Bounds a template's time: its calls are put into loops and macros."""

    def call(self, line: int) -> ExprStmt:
        """Return a statement that looks at the clock."""
        statement = ExprStmt(self.call_method("_check"))
        statement.set_lineno(line)
        return statement

    def _check(self) -> None:
        if time.monotonic() > _deadline.get():
            raise SecurityError(f"it takes longer than {LONGEST_RENDERING_S:g} s")


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates end."""

    intercepted_binops = frozenset({"*", "**"})

    def compile_with_clock(self, tree: TemplateTree) -> Template:
        """Return the template of a tree; its loops and macros look at the clock."""
        clock = self.extensions[_Clock.identifier]
        assert isinstance(clock, _Clock)
        blocks: list[For | MacroBlock | CallBlock] = [
            *tree.find_all(For),
            *tree.find_all(MacroBlock),
            *tree.find_all(CallBlock),
        ]
        for block in blocks:
            block.body.insert(0, clock.call(block.lineno))
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Compute a product or a power. Raises SecurityError for one that is huge."""
        if _size(operator, left, right) > _LONGEST_PRODUCT:
            raise SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: object, right: object) -> int:
    """Return about how long a product or a power is, in elements or bits; 0 for other operands."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits * max(right, 0) if operator == "**" else bits + right.bit_length()
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * count
    return 0


class _Namespace(Namespace):
    """jinja's namespace without names that begin with an underscore, which could reach Python's inside."""

    def __init__(self, *pairs: object, **attributes: object) -> None:
        super().__init__(*pairs, **attributes)
        for name in dict(*pairs, **attributes):
            _check_name(name)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace's attribute is {name!r}; it must not begin with an underscore")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
