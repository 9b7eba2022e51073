"""`triton-llama chat`: a conversation on a terminal, or with the lines of a pipe as messages."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import click

from triton_llama import Completion, RejectedInputError, SamplingParams, TritonLlamaError
from triton_llama.cli.generate import check_streaming
from triton_llama.cli.options import Server, sampling_options, server_options
from triton_llama.cli.output import exit_code, report
from triton_llama.tokenizer import ChatTemplate, Template

_RESERVE = 128  # tokens of the context for an answer whose max_tokens is the server's
_TEMPLATE = click.Path(exists=True, dir_okay=False, path_type=Path)
_CONTEXT = "Tokens of prompt and answer.  [default: the checkpoint's, at most 4096, as the server's]"


@dataclass
class Conversation:
    """The exchanges (message and answer) that fit into `context` tokens, with `max_tokens` for the next answer."""

    template: Template
    system: str | None
    context: int
    max_tokens: int
    exchanges: list[tuple[str, str]] = field(default_factory=list)

    def prompt(self, message: str) -> tuple[str, int]:
        """Return the prompt for a message, and how many of the oldest exchanges no longer fit: they are removed.

        Raises RejectedInputError, and removes none, if the message alone doesn't fit or the template refuses it.
        """
        for first in range(len(self.exchanges) + 1):
            kept = self.exchanges[first:]
            spoken = [] if self.system is None else [("system", self.system)]
            spoken += [turn for asked, answer in kept for turn in (("user", asked), ("assistant", answer))]
            spoken.append(("user", message))
            prompt = self.template.render([{"role": role, "content": text} for role, text in spoken])
            tokens = self.template.count(prompt)
            if tokens + self.max_tokens <= self.context:
                self.exchanges = kept
                return prompt, first
        raise RejectedInputError(
            f"the message makes a prompt of {tokens} tokens and max_tokens is {self.max_tokens}, "
            f"together they must be at most the context of {self.context}"
        )


@click.command(short_help="Talk to a chat model.")
@click.option("--tokenizer", required=True, metavar="PATH_OR_HUB_ID", help="The served checkpoint's tokenizer.")
@click.option("--chat-template", "file", type=_TEMPLATE, help="Jinja template, over the tokenizer's own.")
@click.option("--system", metavar="TEXT", help="A system message before everything.")
@click.option("--context", type=click.IntRange(min=2), help=_CONTEXT)
@sampling_options
@server_options
def chat(
    tokenizer: str, file: Path | None, system: str | None, context: int | None, params: SamplingParams, server: Server
) -> int:
    """Talk to a chat model on a server of the config `streaming`.

    Each line is a message. Ctrl-C stops the answer, /reset removes all messages, Ctrl-D or /exit ends. The prompt is
    made here, with the tokenizer's chat template, which needs transformers (the extra `chat`). Once the conversation
    outgrows the context, its oldest exchanges are left out, the system message never. An answer that was stopped or
    broke off counts as far as it was shown; a message without any answer is removed. When stdin is no terminal, its
    lines are the messages, and Ctrl-C ends the program.
    """
    try:
        template = ChatTemplate.load(tokenizer, file)
        longest = template.default_context() if context is None else context
        reserve = _RESERVE if params.max_tokens is None else params.max_tokens
        if reserve >= longest:
            raise ValueError(f"--max-tokens is {reserve}, must be less than the context of {longest}")
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context()) from error
    asyncio.run(check_streaming(server))
    if sys.stdin.isatty():
        # Line editing and history, in interpreters that have it.
        with suppress(ImportError):
            import readline  # noqa: F401
    with click.open_file("-", "w", encoding="utf-8") as target:
        return _talk(server, Conversation(template, system, longest, reserve), params, target)


def _talk(server: Server, conversation: Conversation, params: SamplingParams, target: IO[str]) -> int:
    """Answer messages until there are no more; return the exit code of the first failure."""
    failure, interactive = 0, sys.stdin.isatty()
    note = partial(click.echo, err=True) if interactive else str
    note("(Ctrl-C stops an answer, /reset forgets, Ctrl-D or /exit ends)")
    while True:
        try:
            message = _read(interactive)
            if message is None or message == "/exit":
                return failure
            if message == "/reset":
                conversation.exchanges = []
            if message in ("", "/reset"):
                continue
            prompt, left_out = conversation.prompt(message)
            if left_out:
                note(f"(left out to fit the context: {left_out} of the oldest exchanges)")
            # In asyncio Ctrl-C cancels the task, and leaves gRPC's locks intact.
            completion = asyncio.run(_answer(server, conversation, message, prompt, params, target))
            if completion.finish_reason == "length":
                note(f"(cut off after {completion.num_output_tokens} tokens; --max-tokens allows more)")
        except KeyboardInterrupt:
            if not interactive:
                raise
            click.echo(err=True)
        except TritonLlamaError as error:
            report(str(error))
            failure = failure or exit_code(error)


async def _answer(
    server: Server, chat: Conversation, message: str, prompt: str, params: SamplingParams, target: IO[str]
) -> Completion:
    # A client for each message: the server may have been restarted since the last one.
    async with server.open_async() as client, client.stream(prompt, params) as stream:
        try:
            async for piece in stream:
                print(piece.text, end="", file=target, flush=True)
        except TritonLlamaError:
            print(end="\n" if stream.text else "", file=target, flush=True)
            raise
        finally:
            if stream.text:
                chat.exchanges.append((message, stream.text))
        print(file=target, flush=True)
        return stream.completion


def _read(interactive: bool) -> str | None:
    """Return the next line, stripped; None at the end. Raises RejectedInputError if it isn't UTF-8."""
    try:
        if interactive:
            # Python keeps typed bytes that aren't UTF-8 as surrogates. A file or a pipe gets no prompt.
            return input("> " if sys.stdout.isatty() else "").encode(errors="surrogateescape").decode().strip()
        return line.decode().strip() if (line := sys.stdin.buffer.readline()) else None
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise RejectedInputError(f"a line of stdin is not UTF-8 at byte {error.start}") from error
