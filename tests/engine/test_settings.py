"""Settings: both sides of each kind of bound, the sources' precedence, and the messages of refusals."""

import pytest
from llama_engine.adapter_names import AdapterSource
from llama_engine.errors import InvalidSettings
from llama_engine.settings import BOUNDS, Settings

MALFORMED = ["", " ", "nan", "inf", "-1", "1_000", " 7", "7\n", "0x10", "1e999", "٣", "ten", "1,5"]
SQL, JSON = AdapterSource("sql", 0, "/loras/sql"), AdapterSource("a/b.c_-", 2**64 - 1, "org/json@v1")
GOOD: dict[str, dict[str, object]] = {
    "slots": {"1": 1, "1024": 1024},
    "memory_fraction": {"0.05": 0.05, "1": 1.0, "1e0": 1.0},
    "quantization": {word: word for word in ("int8", "nf4", "none", "checkpoint")},
    "model": {"meta-llama/Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf"},
    "lora_folder": {"": ""},
    "kv_events": {text: text for text in ("off", "tcp://*:1", "tcp://127.0.0.1:5557/kv@a:1@b", "tcp://pod-0.a:65534")},
    "traces": {text: text for text in ("off", "http://127.0.0.1:4318", "https://[::1]:4318", "http://otel/otlp/")},
    "lora_adapters": {"": (), f"sql=/loras/sql, a/b.c_-:{2**64 - 1}=org/json@v1": (SQL, JSON)},
}
"""A setting of each kind of bound, with texts that it accepts and their values."""
BAD = {
    "slots": ["0", "1025", "8.0", "1e3", *MALFORMED],
    "memory_fraction": ["0.049", "1.001", *MALFORMED],
    "quantization": ["", "INT8", " int8", "int8,nf4"],
    "model": [""],
    "kv_events": ["", "on", "*:5557", "tcp://*", "tcp://*:0", "tcp://*:65535", "tcp://a:1/b c", "ipc://a", "tcp://:1"],
    "traces": ["", "on", "localhost:4318", "tcp://a", "http://", "http://user:key@otel", "http://a b", "http://a/ "],
    "lora_adapters": ["a", "a=", "=b", "a=b,", "a=b,a=c", "a:1=b,c:1=d", "a:0=b", f"a:{2**64}=b", "a b=c"],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_value_within_its_bound_is_accepted(name: str) -> None:
    for text, value in GOOD[name].items():
        assert getattr(Settings.parse({name: text}, {}), name) == value


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_in_a_line(name: str) -> None:
    variable = f"LLAMA_{name.upper()}"
    for text in BAD[name]:
        for source, parameters, environment in (
            (f"parameter {name!r} of the config", {name: text}, {}),
            (f"environment variable {variable}", {}, {variable: text}),
        ):
            with pytest.raises(InvalidSettings) as refused:
                Settings.parse(parameters, environment)
            assert str(refused.value) == f"{source}: {name} must be {BOUNDS[name].description}, got {text!r}"
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


def test_the_log_says_default_for_a_setting_without_a_value() -> None:
    assert Settings(slots=3).describe().startswith("model=default, revision=default, quantization=int8")
