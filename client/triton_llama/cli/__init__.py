"""The command line `triton-llama`: its commands; each failure is one line on stderr and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from triton_llama.cli.generate import generate
from triton_llama.cli.status import SERVER_ERROR, status
from triton_llama.errors import (
    LlamaConnectionError,
    LlamaTimeoutError,
    OverloadedError,
    RejectedInputError,
    TritonLlamaError,
)

OTHER = 1
USAGE = 2
INTERRUPTED = 130
_EXIT_CODES = {LlamaConnectionError: 3, LlamaTimeoutError: 4, RejectedInputError: 5, OverloadedError: 6}
_EPILOG = """\b
Exit codes:
  0    everything was answered
  1    another failure: a full disk, a closed pipe
  2    wrong use of the command line
  3    no connection to the server, or it broke
  4    no answer in time
  5    input rejected
  6    server overloaded; try later
  7    server error, model not found or not ready
  130  interrupted (Ctrl-C)
"""


@click.group(no_args_is_help=False, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show a failure's traceback instead of one line.")
@click.version_option(package_name="triton-llama", message="%(prog)s %(version)s")
@click.pass_obj
def cli(settings: dict[str, bool], debug: bool) -> None:
    """Talk to a Llama that Triton serves."""
    settings["debug"] = debug


for command in (generate, status):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; `arguments` defaults to the process's own."""
    settings = {"debug": False}
    try:
        # click itself exits with 1, without a message, when the reader of the output has left (`| head`).
        code = cli.main(args=arguments, prog_name="triton-llama", standalone_mode=False, obj=settings)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except Exception as error:
        # Every error ends in one line.
        if settings["debug"]:
            raise
        sys.exit(_fail(error))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: Exception) -> int:
    """Write an error to stderr, in one line; return its exit code."""
    code, message = OTHER, str(error)
    if isinstance(error, TritonLlamaError):
        code = next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), SERVER_ERROR)
    elif isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if isinstance(context, click.Context) else ""
        code, message = USAGE, f"{error.format_message()}{hint}"
    elif not isinstance(error, OSError):
        message = f"{type(error).__name__}: {error} (a fault of this program; --debug shows where)"
    click.echo(f"triton-llama: error: {' '.join(message.split())}", err=True)
    return code
