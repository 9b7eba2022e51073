"""`triton-llama generate`: one prompt, as a whole or as a stream, or a file of prompts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import IO

import click
from tqdm import tqdm

from triton_llama.async_client import AsyncLlamaClient
from triton_llama.cli.options import Server, include_prompt_option, sampling_options, server_options
from triton_llama.cli.output import as_json, chunk_as_json, exit_code, on_one_line, outcome_as_json, report
from triton_llama.cli.prompts import Job, read_jobs, read_prompt
from triton_llama.completion import Completion
from triton_llama.errors import RejectedInputError, ServerError, TritonLlamaError
from triton_llama.sampling_params import SamplingParams

# A slow prompt delays the output of those behind it, but not their requests: up to this many times `concurrency` of
# outcomes wait for it.
_AHEAD = 16


@click.command(short_help="Complete a prompt, or a file of them.")
@click.argument("prompt", required=False)
@click.option(
    "--prompts-file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help='Complete each line of it; if it ends in .jsonl, lines are {"prompt": ..., "max_tokens": ..., ...}.',
)
@click.option("--output", "-o", default="-", type=click.Path(dir_okay=False, allow_dash=True), help="[default: stdout]")
@click.option("--json", "json_lines", is_flag=True, help="One JSON object a line: text, counts, finish_reason, seed.")
@click.option("--stream", "streamed", is_flag=True, help="Print the text as it comes; with --json, an object a chunk.")
@click.option(
    "--concurrency", type=click.IntRange(min=1), default=32, show_default=True, help="Requests at a time, for a file."
)
@click.option("--progress/--no-progress", default=None, help="Bar on stderr, for a file.  [default: on a terminal]")
@sampling_options
@include_prompt_option
@server_options
def generate(
    prompt: str | None,
    prompts_file: str | None,
    output: str,
    json_lines: bool,
    streamed: bool,
    concurrency: int,
    progress: bool | None,
    params: SamplingParams,
    server: Server,
) -> int:
    r"""Complete PROMPT; without it, or with -, complete stdin (less its last line break).

    With --prompts-file, each line is a prompt, and blank lines are skipped. Completions are written in the order of the
    prompts, one a line with line breaks as \n, as they become available. A prompt that fails leaves an empty line (with
    --json, an "error") and a message on stderr, and does not affect the other prompts.

    --stream needs a server of the config `streaming`. Its text ends in a line break even if the stream breaks off;
    stderr and the exit code then tell.
    """
    if prompts_file is None:
        _generate_one(server, read_prompt(prompt), params, output, json_lines, streamed)
        return 0
    if prompt is not None:
        raise click.UsageError("give either PROMPT or --prompts-file, not both", click.get_current_context())
    if streamed:
        raise click.UsageError("--stream is for one PROMPT, not for --prompts-file", click.get_current_context())
    jobs = read_jobs(prompts_file, params)
    with click.open_file(output, "w", encoding="utf-8") as target:
        return asyncio.run(_generate_many(server, jobs, concurrency, target, json_lines, progress))


def _generate_one(
    server: Server, prompt: str, params: SamplingParams, output: str, json_lines: bool, streamed: bool
) -> None:
    if streamed:
        # In asyncio Ctrl-C cancels the task: an exception at an arbitrary point can leave gRPC's locks locked.
        with click.open_file(output, "w", encoding="utf-8", lazy=True) as target:
            asyncio.run(_stream(server, prompt, params, target, json_lines))
        return
    with server.open() as client:
        completion = client.generate(prompt, params)
    with click.open_file(output, "w", encoding="utf-8") as target:
        _write(target, as_json(completion) if json_lines else completion.text)


async def check_streaming(server: Server) -> None:
    """Check that the server can stream.

    Raises:
        TritonLlamaError: it can't, or it isn't ready.
    """
    async with server.open_async() as client:
        status = await client.status()
    if status.config is None:
        raise ServerError(f"the model {status.model} is not ready on {status.url}")
    if not status.config.decoupled:
        raise ServerError(
            f"the server at {status.url} answers in one response; to stream it must serve the config `streaming` "
            "(make serve VARIANT=streaming)"
        )


async def _stream(server: Server, prompt: str, params: SamplingParams, target: IO[str], json_lines: bool) -> None:
    async with server.open_async() as client, client.stream(prompt, params) as stream:
        try:
            async for chunk in stream:
                target.write(f"{chunk_as_json(chunk, stream)}\n" if json_lines else chunk.text)
                target.flush()
        except RejectedInputError:
            # If the server refuses streams, that is the better message.
            await check_streaming(server)
            raise
        finally:
            if not json_lines and stream.text:
                _write(target, "")


async def _generate_many(
    server: Server, jobs: list[Job], concurrency: int, target: IO[str], json_lines: bool, progress: bool | None
) -> int:
    first_failure = 0
    # disable=None: tqdm shows a bar if stderr is a terminal.
    with tqdm(total=len(jobs), unit="prompt", disable=None if progress is None else not progress) as bar:
        async with (
            server.open_async() as client,
            aclosing(_outcomes_in_order(client, jobs, concurrency, bar.update)) as outcomes,
        ):
            async for job, result in outcomes:
                # Takes the bar off the screen while something else is written.
                with tqdm.external_write_mode():
                    code = _write_outcome(target, job.line, result, json_lines)
                first_failure = first_failure or code
    return first_failure


async def _outcomes_in_order(
    client: AsyncLlamaClient, jobs: Sequence[Job], concurrency: int, on_done: Callable[[], object]
) -> AsyncGenerator[tuple[Job, Completion | TritonLlamaError], None]:
    """Send the jobs, `concurrency` at a time, and yield their outcomes in order; `on_done` is called as each one ends.

    Closing the generator early cancels the requests in flight.
    """
    slots = asyncio.Semaphore(concurrency)

    async def run(job: Job) -> tuple[Job, Completion | TritonLlamaError]:
        async with slots:
            try:
                return job, await client.generate(job.prompt, job.params)
            except TritonLlamaError as error:
                return job, error
            finally:
                on_done()

    waiting = iter(jobs)
    running: deque[asyncio.Task[tuple[Job, Completion | TritonLlamaError]]] = deque()
    try:
        while True:
            while len(running) < _AHEAD * concurrency and (job := next(waiting, None)) is not None:
                running.append(asyncio.create_task(run(job)))
            if not running:
                return
            yield await running[0]
            running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _write_outcome(target: IO[str], line: int, result: Completion | TritonLlamaError, json_lines: bool) -> int:
    """Write a line, and return its exit code."""
    if isinstance(result, TritonLlamaError):
        report(f"line {line}: {result}")
        _write(target, outcome_as_json(line, result) if json_lines else "")
        return exit_code(result)
    _write(target, outcome_as_json(line, result) if json_lines else on_one_line(result.text))
    return 0


def _write(target: IO[str], line: str) -> None:
    target.write(f"{line}\n")
    target.flush()
