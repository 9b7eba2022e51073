"""`triton-llama generate`: one prompt, or a file of them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import IO

import click
from tqdm import tqdm

from triton_llama.cli.connection_options import Connection, connection_options
from triton_llama.cli.failures import exit_code, report
from triton_llama.cli.in_order import Outcome, outcomes_in_order
from triton_llama.cli.output import as_json, on_one_line, outcome_as_json
from triton_llama.cli.print_stream import print_stream
from triton_llama.cli.prompts import Job, read_jobs, read_prompt
from triton_llama.cli.sampling_options import include_prompt_option, sampling_options
from triton_llama.errors import TritonLlamaError
from triton_llama.sampling_params import SamplingParams


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
@connection_options
def generate(
    prompt: str | None,
    prompts_file: str | None,
    output: str,
    json_lines: bool,
    streamed: bool,
    concurrency: int,
    progress: bool | None,
    params: SamplingParams,
    connection: Connection,
) -> int:
    r"""Complete PROMPT; without it, or with -, complete what stdin says (less its last line break).

    With --prompts-file, each line is a prompt of its own and blank lines are skipped. Completions are written in the
    prompts' order, one a line with line breaks as \n, as they become available. A prompt that fails leaves an empty
    line (with --json, an "error") and a message on stderr, and the others go on.

    --stream needs a server of the config `streaming`. Its text ends in a line break also when it breaks off, which is
    then said on stderr and by the exit code.
    """
    if prompts_file is None:
        if streamed:
            return print_stream(connection, read_prompt(prompt), params, output, json_lines)
        return _generate_one(connection, read_prompt(prompt), params, output, json_lines)
    if prompt is not None:
        raise click.UsageError("give either PROMPT or --prompts-file, not both", click.get_current_context())
    if streamed:
        raise click.UsageError("--stream is for one PROMPT, not for --prompts-file", click.get_current_context())
    jobs = read_jobs(prompts_file, params)
    with click.open_file(output, "w", encoding="utf-8") as target:
        return asyncio.run(_generate_many(connection, jobs, concurrency, target, json_lines, progress))


def _generate_one(connection: Connection, prompt: str, params: SamplingParams, output: str, json_lines: bool) -> int:
    with connection.open() as client:
        completion = client.generate(prompt, params)
    with click.open_file(output, "w", encoding="utf-8") as target:
        _write(target, as_json(completion) if json_lines else completion.text)
    return 0


async def _generate_many(
    connection: Connection,
    jobs: list[Job],
    concurrency: int,
    target: IO[str],
    json_lines: bool,
    progress: bool | None,
) -> int:
    first_failure = 0
    # disable=None leaves it to tqdm: a bar if stderr is a terminal.
    bar_off = None if progress is None else not progress
    with tqdm(total=len(jobs), unit="prompt", disable=bar_off) as bar:
        async with (
            connection.open_async() as client,
            aclosing(outcomes_in_order(client, jobs, concurrency, bar.update)) as outcomes,
        ):
            async for outcome in outcomes:
                # Takes the bar off the screen while something else is written.
                with tqdm.external_write_mode():
                    code = _write_outcome(target, outcome, json_lines)
                first_failure = first_failure or code
    return first_failure


def _write_outcome(target: IO[str], outcome: Outcome, json_lines: bool) -> int:
    line, result = outcome.job.line, outcome.result
    if isinstance(result, TritonLlamaError):
        report(f"line {line}: {result}")
        _write(target, outcome_as_json(line, result) if json_lines else "")
        return exit_code(result)
    _write(target, outcome_as_json(line, result) if json_lines else on_one_line(result.text))
    return 0


def _write(target: IO[str], line: str) -> None:
    target.write(f"{line}\n")
    target.flush()
