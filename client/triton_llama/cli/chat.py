"""`triton-llama chat`: a conversation on a terminal, or the lines of a pipe as its turns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import IO

import click

from triton_llama.chat_template import ChatTemplate
from triton_llama.cli.connection_options import Connection, connection_options
from triton_llama.cli.failures import exit_code, report
from triton_llama.cli.print_stream import check_streaming
from triton_llama.cli.sampling_options import sampling_options
from triton_llama.cli.turns import Turns
from triton_llama.completion import Completion
from triton_llama.conversation import Conversation
from triton_llama.errors import TritonLlamaError
from triton_llama.sampling_params import SamplingParams

_RESERVE = 128
"""Tokens kept free for an answer whose `max_tokens` is left to the server."""


@click.command(short_help="Talk to a chat model.")
@click.option("--tokenizer", required=True, metavar="PATH_OR_HUB_ID", help="The served checkpoint's tokenizer.")
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Jinja template, over the tokenizer's own.",
)
@click.option("--system", metavar="TEXT", help="A system message before everything.")
@click.option(
    "--context",
    type=click.IntRange(min=2),
    help="Tokens of prompt and answer.  [default: the checkpoint's, at most 4096, as the server's]",
)
@sampling_options
@connection_options
def chat(
    tokenizer: str,
    chat_template: Path | None,
    system: str | None,
    context: int | None,
    params: SamplingParams,
    connection: Connection,
) -> int:
    """Talk to a chat model on a server of the config `streaming`.

    Each line is a message. Ctrl-C stops the answer, /reset forgets what was said, Ctrl-D or /exit ends. The prompt is
    made here, with the tokenizer's chat template, which takes transformers (the extra `chat`). Once the conversation
    outgrows the context, its oldest exchanges are left out, the system message never. What has been shown of an answer
    that was stopped or broke off is remembered as the answer; a message of which nothing was answered is forgotten.

    When stdin is no terminal, its lines are the messages, and Ctrl-C ends the program.
    """
    template = _load(tokenizer, chat_template)
    longest = template.default_context() if context is None else context
    reserve = _RESERVE if params.max_tokens is None else params.max_tokens
    if reserve >= longest:
        message = f"--max-tokens is {reserve}, must be less than the context of {longest}"
        raise click.UsageError(message, click.get_current_context())
    conversation = Conversation(template, system, longest, reserve)
    asyncio.run(check_streaming(connection))
    with click.open_file("-", "w", encoding="utf-8") as target:
        return _Chat(connection, conversation, params, target).run()


def _load(tokenizer: str, chat_template: Path | None) -> ChatTemplate:
    try:
        return ChatTemplate.load(tokenizer, chat_template)
    except ModuleNotFoundError as error:
        message = f"chat needs the package {error.name}: pip install 'triton-llama[chat]'"
        raise click.UsageError(message, click.get_current_context()) from error
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context()) from error


class _Chat:
    """The turns, one after the other."""

    def __init__(
        self, connection: Connection, conversation: Conversation, params: SamplingParams, target: IO[str]
    ) -> None:
        self._connection = connection
        self._conversation = conversation
        self._params = params
        self._target = target
        self._turns = Turns()
        self._failure = 0

    def run(self) -> int:
        """Take turns until there are no more; return the exit code of the first that failed."""
        self._note("Ctrl-C stops an answer, /reset forgets, Ctrl-D or /exit ends")
        while True:
            try:
                message = self._turns.read()
                if message is None or message == "/exit":
                    return self._failure
                if message == "/reset":
                    self._conversation.reset()
                else:
                    self._take(message)
            except KeyboardInterrupt:
                if not self._turns.interactive:
                    raise
                click.echo(err=True)
            except TritonLlamaError as error:
                report(str(error))
                self._failure = self._failure or exit_code(error)

    def _take(self, message: str) -> None:
        remembered = len(self._conversation)
        prompt = self._conversation.prompt(message)
        if len(self._conversation) < remembered:
            self._note(f"left out to fit the context: {remembered - len(self._conversation)} of the oldest exchanges")
        # In asyncio, where Ctrl-C cancels the task: an exception out of nowhere is more than gRPC's locks can bear.
        completion = asyncio.run(self._answer(message, prompt))
        if completion.finish_reason == "length":
            self._note(f"cut off after {completion.num_output_tokens} tokens; --max-tokens allows more")

    async def _answer(self, message: str, prompt: str) -> Completion:
        # A client for each turn: between two of them the server may have been started again.
        async with self._connection.open_async() as client, client.stream(prompt, self._params) as stream:
            try:
                async for piece in stream:
                    self._write(piece.text)
            except TritonLlamaError:
                if stream.text:
                    self._write("\n")
                raise
            finally:
                if stream.text:
                    self._conversation.add(message, stream.text)
            self._write("\n")
            return stream.completion

    def _write(self, text: str) -> None:
        self._target.write(text)
        self._target.flush()

    def _note(self, text: str) -> None:
        if self._turns.interactive:
            click.echo(f"({text})", err=True)
