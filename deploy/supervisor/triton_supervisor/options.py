"""Reading tritonserver's command line as tritonserver does: the value that an option ends up with.

Knows how options are written, not which there are. tritonserver reads with getopt_long: `--option=value` or `--option
value`, the last one counts, and a name may be cut short as long as it fits one option only. Which these are depends on
its version, so a name that is cut short is for whoever cares to refuse (`cut_short`). A word that begins with `--`
counts as an option here even where it is the value of another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from triton_supervisor.settings import whole_number

# In lower case, as tritonserver reads booleans in any.
_FALSE = ("false", "off", "0")


def last_value(arguments: Sequence[str], option: str) -> str | None:
    """Return the value of `--option=value` or `--option value`, the last one if there are several; None without."""
    value = None
    for position, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            value = argument.split("=", 1)[1]
        elif argument == option and position + 1 < len(arguments):
            value = arguments[position + 1]
    return value


def last_number(arguments: Sequence[str], option: str, default: int, least: int, most: int) -> int:
    """Return the last value as a whole number within its bounds. Raises RefusedError.

    tritonserver itself takes "80a" for 80 and " 80" for 80, too.
    """
    text = last_value(arguments, option)
    return default if text is None else whole_number(option, text, least, most)


def is_off(arguments: Sequence[str], option: str) -> bool:
    """Return whether `--option=false` has the last word on a service."""
    return (last_value(arguments, option) or "").lower() in _FALSE


def has_option(arguments: Sequence[str], option: str) -> bool:
    """Return whether `option` is given, with a value or without."""
    return any(_name(argument) == option for argument in arguments)


def cut_short(arguments: Sequence[str], options: Iterable[str]) -> tuple[str, str] | None:
    """Return the first name that may be taken for one of these options though it isn't all of it, and that option."""
    known = tuple(options)
    for name in map(_name, arguments):
        if name.startswith("--") and name != "--" and name not in known:
            for option in known:
                if option.startswith(name):
                    return name, option
    return None


def _name(argument: str) -> str:
    return argument.split("=", 1)[0]
