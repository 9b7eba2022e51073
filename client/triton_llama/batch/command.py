"""The command `triton-llama run-batch`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Unpack
from urllib.parse import urlsplit

import click

from triton_llama.address import ServerAddress
from triton_llama.batch.progress import Progress
from triton_llama.batch.request_lines import BatchRequest, read_custom_ids, read_lines
from triton_llama.errors import RejectedInputError

if TYPE_CHECKING:
    from triton_llama.batch.runner import BatchRunner, SendOptions

OPENAI_PORT = 9000
_HINT = "the same command with --resume continues"
_PATH = click.Path(path_type=Path)
_SECONDS = click.FloatRange(min=0, min_open=True)


def _check_url(_context: click.Context, _parameter: click.Parameter, url: str) -> str:
    try:
        ServerAddress.parse(url, "http")
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if "://" not in url:
        address = urlsplit(f"http://{url}")
        port = "" if address.port else f":{OPENAI_PORT}"
        url = f"http://{address.netloc}{port}{address.path}"
    # The base URL of OpenAI's clients has the /v1 that each line has, too.
    return url.rstrip("/").removesuffix("/v1")


def _check_key(_context: click.Context, _parameter: click.Parameter, key: str | None) -> str | None:
    if key and not re.fullmatch("[!-~]+", key):
        raise click.BadParameter("a key is ASCII without spaces")
    return key


@click.command(
    "run-batch", epilog="docs/batch.md has the format of the files, the failures that are retried, and the exit codes."
)
@click.argument("files", nargs=-1, metavar="IN.jsonl OUT.jsonl", type=_PATH)
@click.option("-i", "--input-file", type=_PATH, help="IN.jsonl by vLLM's option.")
@click.option("-o", "--output-file", type=_PATH, help="OUT.jsonl by vLLM's option.")
@click.option("--errors", "errors_file", type=_PATH, help="Lines without an answer.  [default: OUT.errors.jsonl]")
@click.option("--resume", is_flag=True, help="Send the lines that OUT.jsonl and the errors lack.")
@click.option(
    "--url",
    default=f"localhost:{OPENAI_PORT}",
    show_default=True,
    callback=_check_url,
    help=f"The endpoint's: HOST[:PORT] (port {OPENAI_PORT} by default), or with http:// or https:// (80, 443).",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, callback=_check_key, help="The endpoint's.")
@click.option("--concurrency", type=click.IntRange(1, 1024), default=32, show_default=True, help="Lines at a time.")
@click.option("--timeout", type=_SECONDS, default=86400.0, show_default=True, help="Seconds of a line's retries.")
@click.option("--model", help="The model of every line, whatever it names.")
@click.option("--seed", type=click.IntRange(min=0), help="Lines without a seed get one from this and the custom_id.")
def run_batch(
    files: tuple[Path, ...],
    input_file: Path | None,
    output_file: Path | None,
    errors_file: Path | None,
    resume: bool,
    **options: Unpack[SendOptions],
) -> None:
    """Send the lines of IN.jsonl, OpenAI's batch requests, to the OpenAI endpoint; append each answer to OUT.jsonl."""
    if os.name != "posix":
        raise click.UsageError("run-batch needs POSIX (Linux, macOS, WSL): it locks its files")
    # The other commands start on Windows, too, and without aiohttp.
    from triton_llama.batch.answer_file import AnswerFile
    from triton_llama.batch.runner import BatchRunner

    paths = [path for path in (input_file, *files, output_file) if path is not None]
    if len(paths) != 2:
        raise click.UsageError(f"the files are {len(paths)}; they must be two, IN.jsonl and OUT.jsonl")
    source, out = paths
    errors_file = errors_file or out.with_suffix(".errors.jsonl")
    _check_files(source, out, errors_file, resume)
    with ExitStack() as opened:
        try:
            custom_ids = read_custom_ids(source)
            answers, errors = (opened.enter_context(AnswerFile(path)) for path in (out, errors_file))
            answered, failed = answers.repair_and_read_ids(custom_ids), errors.repair_and_read_ids(custom_ids)
        except RejectedInputError as error:
            raise click.UsageError(str(error)) from error
        except BlockingIOError as error:
            raise click.UsageError(f"another run-batch writes {out} or {errors_file}") from error
        except OSError as error:
            raise click.UsageError(str(error)) from error
        progress = Progress(len(custom_ids), len(answered), len(failed - answered))
        done = answered | failed
        requests = (request for _, request in read_lines(source) if request.custom_id not in done)
        try:
            asyncio.run(_run(BatchRunner(answers, errors, progress, options), requests))
        except asyncio.CancelledError:
            raise click.ClickException(f"stopped, with {progress}; {_HINT}") from None
        except OSError as error:
            raise click.ClickException(f"{error}; {_HINT}") from error
    click.echo(f"{progress.answered:,} of {progress.total:,} lines are answered in {out}, {progress.tokens:,} tokens")
    if progress.failed:
        raise RejectedInputError(f"{progress.failed:,} lines are without an answer, see {errors_file}")


def _check_files(source: Path, out: Path, errors_file: Path, resume: bool) -> None:
    # A pipe could not be read twice.
    if not source.is_file():
        raise click.UsageError(f"{source} is not a file")
    if len({path.resolve() for path in (source, out, errors_file)}) < 3:
        raise click.UsageError(f"{source}, {out} and {errors_file} must be three files")
    for path in (out, errors_file):
        if path.exists() and not resume:
            raise click.UsageError(f"{path} exists; --resume continues it")


async def _run(runner: BatchRunner, requests: Iterator[BatchRequest]) -> None:
    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    await runner.run(requests)
