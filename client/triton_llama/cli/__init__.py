"""The command line `triton-llama`: its commands; each failure is one line on stderr and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from triton_llama.cli.generate import generate
from triton_llama.cli.output import INTERRUPTED, OTHER, USAGE, exit_code, report
from triton_llama.cli.status import status
from triton_llama.errors import TritonLlamaError

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
With --prompts-file, the code of the first prompt that failed.
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
    if isinstance(error, TritonLlamaError):
        report(str(error))
        return exit_code(error)
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if isinstance(context, click.Context) else ""
        report(f"{error.format_message()}{hint}")
        return USAGE
    if isinstance(error, OSError):
        report(str(error))
        return OTHER
    report(f"{type(error).__name__}: {error} (a fault of this program; --debug shows where)")
    return OTHER
