"""`triton-llama generate`: one prompt, as a whole or as a stream, or a file of prompts."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from typing import IO

import click
from tqdm import tqdm

from triton_llama.base_client import Outcome
from triton_llama.cli.options import Connect, include_prompt_option, sampling_options, server_options
from triton_llama.cli.output import as_json, exit_code, on_one_line, report
from triton_llama.cli.prompts import Job, read_jobs, read_prompt
from triton_llama.completion import CompletionStream
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
@click.option("--stream", "streamed", is_flag=True, help="Print the text as it comes; with --json, an object a piece.")
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
    connect: Connect,
) -> int:
    r"""Complete PROMPT; without it, or with -, complete stdin (less its last line break).

    With --prompts-file, each line is a prompt, and blank lines are skipped. Completions are written in the order of the
    prompts, one a line with line breaks as \n, as they become available. A prompt that fails leaves an empty line (with
    --json, an "error") and a message on stderr, and does not affect the other prompts.

    --stream needs a server of the config `streaming`. Its text ends in a line break even if the stream breaks off;
    stderr and the exit code then tell.
    """
    if prompts_file is None:
        _generate_one(connect, read_prompt(prompt), params, output, json_lines, streamed)
        return 0
    if prompt is not None:
        raise click.UsageError("give either PROMPT or --prompts-file, not both", click.get_current_context())
    if streamed:
        raise click.UsageError("--stream is for one PROMPT, not for --prompts-file", click.get_current_context())
    jobs = read_jobs(prompts_file, params)
    with click.open_file(output, "w", encoding="utf-8") as target:
        return _generate_many(connect, jobs, concurrency, target, json_lines, progress)


def _generate_one(
    connect: Connect, prompt: str, params: SamplingParams, output: str, json_lines: bool, streamed: bool
) -> None:
    with connect() as client, click.open_file(output, "w", encoding="utf-8", lazy=True) as target:
        if streamed:
            _stream(connect, client.stream(prompt, params), target, json_lines)
        else:
            completion = client.generate(prompt, params)
            _write(target, as_json(asdict(completion)) if json_lines else completion.text)


def check_streaming(connect: Connect) -> None:
    """Check that the server can stream; raises TritonLlamaError if it can't, or isn't ready."""
    with connect() as client:
        status = client.status()
    if status.config is None:
        raise ServerError(f"the model {status.model} is not ready on {status.url}")
    if not status.config.decoupled:
        raise ServerError(
            f"the server at {status.url} answers in one response; to stream it must serve the config `streaming` "
            "(make serve VARIANT=streaming)"
        )


def _stream(connect: Connect, stream: CompletionStream, target: IO[str], json_lines: bool) -> None:
    with stream:
        try:
            for piece in stream:
                fields = {**asdict(piece), "request_id": stream.request_id, "seed": stream.seed}
                target.write(f"{as_json(fields)}\n" if json_lines else piece.text)
                target.flush()
        except RejectedInputError:
            # If the server refuses streams, that is the better message.
            check_streaming(connect)
            raise
        finally:
            if not json_lines and stream.text:
                _write(target, "")


def _generate_many(
    connect: Connect, jobs: list[Job], concurrency: int, target: IO[str], json_lines: bool, progress: bool | None
) -> int:
    """Send the jobs, `concurrency` at a time; write their outcomes in order, and return the first failure's code."""

    def complete(job: Job) -> Outcome:
        try:
            return client.generate(job.prompt, job.params)
        except TritonLlamaError as error:
            return error
        finally:
            bar.update()

    first_failure, waiting = 0, iter(jobs)
    running: deque[tuple[int, Future[Outcome]]] = deque()
    # disable=None: tqdm shows a bar if stderr is a terminal.
    bar = tqdm(total=len(jobs), unit="prompt", disable=None if progress is None else not progress)
    # If this is left early, closing the client ends the requests in flight, and then the threads end.
    with bar, ThreadPoolExecutor(concurrency) as threads, connect() as client:
        while True:
            for job in islice(waiting, _AHEAD * concurrency - len(running)):
                running.append((job.line, threads.submit(complete, job)))
            if not running:
                return first_failure
            line, future = running.popleft()
            outcome = future.result()
            # Takes the bar off the screen while something else is written.
            with tqdm.external_write_mode():
                code = _write_outcome(target, line, outcome, json_lines)
            first_failure = first_failure or code


def _write_outcome(target: IO[str], line: int, outcome: Outcome, json_lines: bool) -> int:
    """Write a line, and return its exit code."""
    if isinstance(outcome, TritonLlamaError):
        report(f"line {line}: {outcome}")
        fields: dict[str, object] = {"error": {"type": type(outcome).__name__, "message": str(outcome)}}
        text = ""
    else:
        fields, text = asdict(outcome), on_one_line(outcome.text)
    _write(target, as_json({"line": line, **fields}) if json_lines else text)
    return exit_code(outcome) if isinstance(outcome, TritonLlamaError) else 0


def _write(target: IO[str], line: str) -> None:
    target.write(f"{line}\n")
    target.flush()
