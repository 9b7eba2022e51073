"""Settings: both sides of every bound, the sources' precedence, and the messages of refusals."""

from dataclasses import fields

import pytest
from llama_engine.errors import InvalidSettings
from llama_engine.settings import BOUNDS, Settings

MILLION = 1 << 20
INTEGERS = {  # The bounds, both accepted.
    "slots": (1, 1024),
    "max_model_len": (2, MILLION),
    "default_max_tokens": (1, MILLION),
    "prefill_tokens": (1, MILLION),
    "stream_interval": (1, 64),
    "drain_seconds": (0, 3600),
    "stuck_seconds": (0, 3600),
    "int8_terms": (1, 2),
}
WORDS = {  # All that are accepted.
    "quantization": ("int8", "nf4", "none", "checkpoint"),
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "int8"),
    "kernels": ("auto", "stock", "fused"),
    "cuda_graphs": ("off", "on"),
    "truncate_max_tokens": ("off", "on"),
    "scheduling": ("inflight", "batch"),
    "log_requests": ("none", "summary", "prompts"),
    "log_format": ("text", "json"),
}
GOOD: dict[str, dict[str, object]] = {
    "model": {"/a/path": "/a/path", "meta-llama/Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf"},
    "revision": {"main": "main"},
    "int8_threshold": {"0": 0.0, "1000": 1000.0, "6.0": 6.0, "6e0": 6.0},
    "memory_fraction": {"0.05": 0.05, "1": 1.0, "1e-1": 0.1},
    **{name: {str(bound): bound for bound in bounds} for name, bounds in INTEGERS.items()},
    **{name: {word: word for word in words} for name, words in WORDS.items()},
}
MALFORMED = ("", " ", "nan", "inf", "-inf", "-1", "+5", "1_000", " 7", "7 ", "7\n", "0x10", "1e999", "٣", "ten", "1,5")
BAD: dict[str, tuple[str, ...]] = {
    "model": ("", "  "),
    "revision": ("", "\t"),
    "int8_threshold": ("-0.1", "1000.1", *MALFORMED),
    "memory_fraction": ("0.049", "1.001", "0", *MALFORMED),
    **{
        name: (str(low - 1), str(high + 1), f"{high}.0", "1e3", "1.5", *MALFORMED)
        for name, (low, high) in INTEGERS.items()
    },
    **{
        name: ("", words[0].upper(), f" {words[0]}", ",".join(words[:2]), "1", "true", "default")
        for name, words in WORDS.items()
    },
}
BOUND = {
    "slots": "a whole number from 1 to 1024",
    "memory_fraction": "a number from 0.05 to 1",
    "quantization": "one of int8, nf4, none, checkpoint",
}


def test_every_setting_has_a_bound_and_a_test_of_it() -> None:
    names = {field.name for field in fields(Settings)}
    assert names == set(BOUNDS) == set(GOOD) == set(BAD)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in GOOD.items() for text in texts])
def test_a_value_within_its_bound_is_accepted_unchanged(name: str, text: str) -> None:
    assert getattr(Settings.parse({name: text}, {}), name) == GOOD[name][text]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_a_bad_value_is_refused_by_source_name_bound_and_value(name: str, text: str) -> None:
    for source, given in (
        (f"parameter {name!r} of the config", ({name: text}, {})),
        (f"environment variable LLAMA_{name.upper()}", ({}, {f"LLAMA_{name.upper()}": text})),
    ):
        with pytest.raises(InvalidSettings) as refused:
            Settings.parse(*given)
        start, end = f"{source}: {name} must ", f", got {text!r}"
        assert str(refused.value).startswith(f"{start}be {BOUND[name]}{end}" if name in BOUND else start)
        assert str(refused.value).endswith(end)
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
