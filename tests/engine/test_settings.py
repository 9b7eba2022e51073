"""Settings: both sides of every bound, the sources' precedence, and the messages of refusals."""

from dataclasses import fields

import pytest
from llama_engine.adapter_names import AdapterSource, AdapterSources
from llama_engine.bounds import Address, Bound, Choice, Integer, Real, Text, Url
from llama_engine.errors import InvalidSettings
from llama_engine.settings import BOUNDS, Settings

MALFORMED = ("", " ", "nan", "inf", "-inf", "-1", "1_000", " 7", "7 ", "7\n", "0x10", "1e999", "٣", "ten", "1,5")


def _good(bound: Bound[object]) -> dict[str, object]:
    """Return texts that a bound accepts, each with its value."""
    match bound:
        case Choice(words):
            return {word: word for word in words}
        case Integer(int(low), int(high)):
            return {str(low): low, str(high): high}
        case Real(float(low), float(high)):
            return {f"{low}": low, f"{high:g}": high, f"{high}e0": high}
        case Address():
            return {
                text: text for text in ("off", "tcp://*:1", "tcp://127.0.0.1:5557/kv@a:1@b", "tcp://pod-0.llama:65534")
            }
        case AdapterSources():
            sql, json = AdapterSource("sql", 0, "/loras/sql"), AdapterSource("a/b.c_-", 2**64 - 1, "org/json@v1")
            return {"": (), "sql=/loras/sql": (sql,), f"sql=/loras/sql, a/b.c_-:{2**64 - 1}=org/json@v1": (sql, json)}
        case Url():
            return {text: text for text in ("off", "http://127.0.0.1:4318", "https://[::1]:4318", "http://otel/otlp/")}
    return {"meta-llama/Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf"}


def _bad(bound: Bound[object]) -> tuple[str, ...]:
    """Return texts that a bound refuses."""
    match bound:
        case Choice(words):
            return ("", words[0].upper(), f" {words[0]}", ",".join(words[:2]), "0", "true")
        case Integer(int(low), int(high)):
            return (str(low - 1), str(high + 1), f"{high}.0", "1e3", *MALFORMED)
        case Real(float(low), float(high)):
            return (f"{low - 0.001:.3f}", f"{high + 0.001:.3f}", *MALFORMED)
        case Address():
            return ("", "on", "*:5557", "tcp://*", "tcp://*:0", "tcp://*:65535", "tcp://a:1/b c", "ipc://a", "tcp://:1")
        case Url():
            return (
                "",
                "on",
                "localhost:4318",
                "tcp://a",
                "http://",
                "http://user:key@otel",
                "http://a b",
                "http://a/ ",
            )
        case AdapterSources():
            return (
                "a",
                "a=",
                "=b",
                "a=b,",
                "a=b,a=c",
                "a:1=b,c:1=d",
                "a:0=b",
                f"a:{2**64}=b",
                "a b=c",
                f"{'a' * 129}=b",
            )
        case Text(may_be_empty=True):
            return ()
    return ("",)


def test_every_setting_has_a_bound() -> None:
    assert {field.name for field in fields(Settings)} == set(BOUNDS)
    for name, message in (
        ("slots", "a whole number, at least 1 and at most 1024"),
        ("memory_fraction", "a finite number, at least 0.05 and at most 1"),
        ("quantization", "one of int8, nf4, none, checkpoint"),
    ):
        with pytest.raises(InvalidSettings, match=f": {name} must be {message}, got 'x'$"):
            Settings.parse({name: "x"}, {})


@pytest.mark.parametrize("name", BOUNDS)
def test_a_value_within_its_bound_is_accepted(name: str) -> None:
    for text, value in _good(BOUNDS[name]).items():
        assert getattr(Settings.parse({name: text}, {}), name) == value


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bad_value_is_refused_in_a_line(name: str) -> None:
    for text in _bad(BOUNDS[name]):
        for source, given in (
            (f"parameter {name!r} of the config", ({name: text}, {})),
            (f"environment variable LLAMA_{name.upper()}", ({}, {f"LLAMA_{name.upper()}": text})),
        ):
            with pytest.raises(InvalidSettings) as refused:
                Settings.parse(*given)
            assert str(refused.value).startswith(f"{source}: {name} must ")
            assert str(refused.value).endswith(f", got {text!r}")
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("parameters", "environment", "message"),
    [
        ({"slot": "8"}, {}, r"^parameter 'slot' of the config: unknown setting \(did you mean 'slots'"),
        ({}, {"LLAMA_MODLE": "/a"}, "^environment variable LLAMA_MODLE: .*did you mean 'model'"),
        ({"zzzzzz": "8"}, {}, f"unknown setting; known are {', '.join(sorted(BOUNDS))}$"),
    ],
)
def test_an_unknown_setting_is_refused_with_a_suggestion(
    parameters: dict[str, str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidSettings, match=message):
        Settings.parse(parameters, environment)


def test_the_environment_overrides_parameters_which_override_defaults() -> None:
    assert Settings.parse({}, {"PATH": "/bin", "MYLLAMA_SLOTS": "x", "LLAMAS": "7", "HF_TOKEN": "y"}) == Settings()
    assert Settings.parse({"slots": "3"}, {}).slots == 3
    both = Settings.parse({"slots": "3", "dtype": "float16"}, {"LLAMA_SLOTS": "4", "LLAMA_DEVICE": "cpu"})
    assert (both.slots, both.dtype, both.device, both.model) == (4, "float16", "cpu", None)
