"""Settings: both sides of every bound, the sources' precedence, and the messages of refusals."""

from dataclasses import fields

import pytest
from llama_engine.errors import InvalidSettings
from llama_engine.settings import BOUNDS, Settings

MILLION = str(1 << 20)
GOOD: dict[str, dict[str, object]] = {
    "model": {"/a/path": "/a/path", "meta-llama/Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf"},
    "revision": {"main": "main"},
    "quantization": {word: word for word in ("int8", "nf4", "none", "checkpoint")},
    "int8_threshold": {"0": 0.0, "1000": 1000.0, "6.0": 6.0, "6e0": 6.0},
    "dtype": {word: word for word in ("auto", "float32", "float16", "bfloat16")},
    "device": {word: word for word in ("auto", "cpu", "cuda")},
    "kernels": {word: word for word in ("stock", "fused")},
    "cuda_graphs": {word: word for word in ("off", "on")},
    "scheduling": {word: word for word in ("inflight", "batch")},
    "slots": {"1": 1, "1024": 1024},
    "max_model_len": {"2": 2, MILLION: 1 << 20},
    "default_max_tokens": {"1": 1, MILLION: 1 << 20},
    "prefill_tokens": {"1": 1, MILLION: 1 << 20},
    "drain_seconds": {"0": 0, "3600": 3600},
    "stuck_seconds": {"0": 0, "3600": 3600},
    "memory_fraction": {"0.05": 0.05, "1": 1.0, "1e-1": 0.1},
    "log_requests": {word: word for word in ("none", "summary", "prompts")},
    "log_format": {word: word for word in ("text", "json")},
}
OVER_A_MILLION = str((1 << 20) + 1)
MALFORMED = ("", " ", "nan", "inf", "-inf", "-1", "+5", "1_000", " 7", "7 ", "7\n", "0x10", "1e999", "٣", "ten", "1,5")
BAD: dict[str, tuple[str, ...]] = {
    "model": ("", "  "),
    "revision": ("", "\t"),
    "quantization": ("", "INT8", "fp8", " int8", "int8,nf4"),
    "int8_threshold": ("-0.1", "1000.1", *MALFORMED),
    "dtype": ("", "half", "Float16", "torch.float16"),
    "device": ("", "CPU", "cuda:0", "gpu"),
    "kernels": ("", "Fused", "auto", "plain"),
    "cuda_graphs": ("", "On", "true", "1"),
    "scheduling": ("", "Batch", "in-flight"),
    "slots": ("0", "1025", "8.0", "1e3", *MALFORMED),
    "max_model_len": ("1", OVER_A_MILLION, "8.0", "1e3", *MALFORMED),
    "default_max_tokens": ("0", OVER_A_MILLION, "8.0", "1e3", *MALFORMED),
    "prefill_tokens": ("0", OVER_A_MILLION, "8.0", "1e3", *MALFORMED),
    "drain_seconds": ("3601", "1.5", *MALFORMED),
    "stuck_seconds": ("3601", "1.5", *MALFORMED),
    "memory_fraction": ("0.049", "1.001", "0", *MALFORMED),
    "log_requests": ("", "all", "Prompts", "true", "summary,prompts"),
    "log_format": ("", "JSON", "logfmt"),
}


def test_every_setting_has_a_bound_and_a_test_of_it() -> None:
    names = {field.name for field in fields(Settings)}
    assert names == set(BOUNDS) == set(GOOD) == set(BAD)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in GOOD.items() for text in texts])
def test_a_value_within_its_bound_is_accepted_unchanged(name: str, text: str) -> None:
    assert getattr(Settings.parse({name: text}, {}), name) == GOOD[name][text]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_a_bad_value_is_refused_by_source_name_and_value(name: str, text: str) -> None:
    with pytest.raises(InvalidSettings) as parameter:
        Settings.parse({name: text}, {})
    with pytest.raises(InvalidSettings) as variable:
        Settings.parse({}, {f"LLAMA_{name.upper()}": text})
    assert str(parameter.value).startswith(f"parameter {name!r} of the config: {name} must ")
    assert str(variable.value).startswith(f"environment variable LLAMA_{name.upper()}: {name} must ")
    for error in (parameter, variable):
        assert str(error.value).endswith(f", got {text!r}")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "bound"),
    [
        ("slots", "0", "a whole number from 1 to 1024"),
        ("memory_fraction", "2", "a number from 0.05 to 1"),
        ("quantization", "fp8", "one of int8, nf4, none, checkpoint"),
    ],
)
def test_a_refusal_names_the_bound(name: str, text: str, bound: str) -> None:
    with pytest.raises(InvalidSettings) as refused:
        Settings.parse({name: text}, {})
    assert str(refused.value) == f"parameter {name!r} of the config: {name} must be {bound}, got {text!r}"


def test_an_unknown_setting_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        InvalidSettings, match=r"^parameter 'slot' of the config: unknown setting \(did you mean 'slots'"
    ):
        Settings.parse({"slot": "8"}, {})
    with pytest.raises(InvalidSettings, match=r"^environment variable LLAMA_MODLE: .*did you mean 'model'"):
        Settings.parse({}, {"LLAMA_MODLE": "/a"})
    with pytest.raises(InvalidSettings, match="unknown setting; known are ") as refused:
        Settings.parse({"zzzzzz": "8"}, {})
    assert all(name in str(refused.value) for name in BOUNDS)


def test_the_environment_overrides_parameters_which_override_defaults() -> None:
    assert Settings.parse({}, {}) == Settings()
    assert Settings.parse({"slots": "3"}, {}).slots == 3
    assert Settings.parse({"slots": "3"}, {"LLAMA_SLOTS": "4"}).slots == 4
    both = Settings.parse({"slots": "3", "dtype": "float16"}, {"LLAMA_SLOTS": "4", "LLAMA_DEVICE": "cpu"})
    assert (both.slots, both.dtype, both.device, both.model) == (4, "float16", "cpu", None)


def test_variables_of_other_programs_are_ignored() -> None:
    assert Settings.parse({}, {"PATH": "/bin", "MYLLAMA_SLOTS": "x", "LLAMAS": "7", "HF_TOKEN": "y"}) == Settings()


def test_the_log_has_every_setting() -> None:
    settings = Settings(slots=3, model="/a")
    assert all(f"{field.name}={getattr(settings, field.name)}" in settings.describe() for field in fields(Settings))
