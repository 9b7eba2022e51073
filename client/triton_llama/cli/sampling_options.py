"""The options that say how to sample: one for each field of `SamplingParams`.

The bounds in the help are the server's; it checks them, not the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import click

from triton_llama.sampling_params import SamplingOptions, SamplingParams

include_prompt_option = click.option("--include-prompt", is_flag=True, help="Print the prompt before its completion.")


def sampling_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options to a command; it gets them as one argument `params: SamplingParams`.

    With `include_prompt_option` below it, that one is among them.
    """

    @wraps(command)
    def with_params(
        *arguments: object,
        max_tokens: int | None,
        min_tokens: int | None,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        repetition_penalty: float | None,
        frequency_penalty: float | None,
        presence_penalty: float | None,
        seed: int | None,
        stop_word: tuple[str, ...],
        bad_word: tuple[str, ...],
        from_checkpoint: bool,
        include_prompt: bool = False,
        **others: object,
    ) -> int:
        every = SamplingOptions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            seed=seed,
            stop_words=stop_word or None,
            bad_words=bad_word or None,
            exclude_input_in_output=False if include_prompt else None,
        )
        given = {name: value for name, value in every.items() if value is not None}
        base = SamplingParams.from_checkpoint() if from_checkpoint else SamplingParams()
        return command(*arguments, params=base.with_options(**given), **others)  # type: ignore[arg-type]

    # No click defaults: an option that wasn't given must be told from one that was, for --from-checkpoint.
    options = (
        click.option("--max-tokens", "-n", type=int, help="Tokens to generate at most, >= 1.  [default: 128]"),
        click.option("--min-tokens", type=int, help="Tokens before the text may end, 0 ... max.  [default: 0]"),
        click.option("--temperature", "-t", type=float, help="0 (greedy) ... 2.  [default: 0]"),
        click.option("--top-k", type=int, help="Among the k likeliest tokens, >= 0; 0 = off.  [default: 0]"),
        click.option("--top-p", type=float, help="Among the likeliest of this sum, > 0 ... 1.  [default: 1]"),
        click.option("--repetition-penalty", type=float, help="> 0; 1 = off.  [default: 1]"),
        click.option("--frequency-penalty", type=float, help="-2 ... 2; 0 = off.  [default: 0]"),
        click.option("--presence-penalty", type=float, help="-2 ... 2; 0 = off.  [default: 0]"),
        click.option("--seed", type=int, help="0 ... 2**64 - 1.  [default: drawn, and shown by --json]"),
        click.option("--stop-word", multiple=True, metavar="TEXT", help="End before it; up to 16 times."),
        click.option("--bad-word", multiple=True, metavar="TEXT", help="Never produce it; repeatable."),
        click.option(
            "--from-checkpoint",
            is_flag=True,
            help="Leave what isn't given to the checkpoint's generation config (may cost batching).",
        ),
    )
    for option in reversed(options):
        with_params = option(with_params)
    return with_params
