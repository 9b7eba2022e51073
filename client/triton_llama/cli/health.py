"""`triton-llama health`: the probe that orchestrators run, for people. Its options are `triton_llama.health`'s own."""

from __future__ import annotations

import click

from triton_llama.health import main


@click.command(
    short_help="Tell whether the model computes: healthy, --live or --ready.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def health(arguments: tuple[str, ...]) -> int:
    """Hand the arguments on as they are: parsed in one place, the command is the same in the image and here."""
    return main(arguments, prog="triton-llama health")
