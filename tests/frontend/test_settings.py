"""Settings of the endpoint: parsed strictly, refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import InvalidSettingsError, Settings

PREFIX = "TRITON_LLAMA_OPENAI_"


def test_an_option_overrides_the_environment_which_overrides_the_default() -> None:
    environment = {f"{PREFIX}PORT": "9001", f"{PREFIX}TRITON_MODEL": "other", "LLAMA_MODEL": "x"}
    settings = Settings.parse(["--port", "9002"], environment)
    assert (settings.port, settings.triton_model, settings.host) == (9002, "other", "127.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {f"{PREFIX}PROT": "1"}, f"environment variable {PREFIX}PROT: unknown setting .did you mean 'port'"),
        (["--port", "70000"], {}, "option --port: port is '70000'; it must be less than or equal to 65535"),
        ([], {f"{PREFIX}GRACE": "7 s"}, "grace is '7 s'; it must be a valid integer"),
        (["--log-requests", "all"], {}, "log_requests is 'all'; it must be 'none', 'summary' or 'prompts'"),
        (["--traces", "localhost:4318"], {}, "traces is 'localhost:4318'; it must be off, or a URL such as http://127"),
        (["--traces", "http://key@collector"], {}, "traces is .*; it must be off, or a URL"),
        (["--api-keys-file", "/does/not/exist"], {}, "api_keys_file is .*; it must be a file that exists"),
    ],
)
def test_a_bad_setting_is_refused_by_name(arguments: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidSettingsError, match=message):
        Settings.parse(arguments, environment)


MODELS: list[tuple[str, str]] = [
    ("[]", "at least 1 item"),
    ('[{"served_name": "a"}, {"served_name": "a"}]', "two models have one name"),
    ('[{"tokenizer": "x"}]', r"\[0\].tokenizer is unknown"),
    ('[{"triton": "http://x"}]', "triton: url is 'http://x'"),
    ('[{"triton": "a:1,b:1"}]', "triton is 'a:1,b:1'; it must be one address; several"),
    ('[{"chat_template": "/does/not/exist"}]', "chat_template is '/does/not/exist'; it must be a file"),
]


@pytest.mark.parametrize(("content", "message"), MODELS)
def test_a_bad_file_of_models_is_refused_with_its_reason(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text(content)
    with pytest.raises(InvalidSettingsError, match=message):
        Models.of_settings(Settings(models_file=file))


def test_a_model_beside_a_file_of_models_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.touch()
    with pytest.raises(InvalidSettingsError, match="models_file lists the models, so triton_model can't be given"):
        Settings.parse(["--models-file", str(file), "--triton-model", "x"], {})


@pytest.mark.parametrize(
    ("content", "message"), [(b"{% if %}", "can't be compiled"), (b"\xff", r"\.jinja' can't be read")]
)
def test_a_template_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    template = tmp_path / "t.jinja"
    template.write_bytes(content)
    with pytest.raises(InvalidSettingsError, match=f"chat_template .*{message}"):
        Models.of_settings(Settings(chat_template=template))
