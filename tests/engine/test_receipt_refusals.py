"""A receipt that is malformed, changed or another server's is refused by name, value and bound."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from engine.checkpoints import save_small
from engine.engines import engine_of, load
from engine.parsing import tensor
from engine.receipts import parse, receipts_of, rehashed, verify
from llama_engine import receipt_origin
from llama_engine.api.request_parser import RequestParser
from llama_engine.engine import Engine
from llama_engine.errors import GenerationError, InvalidRequest, Unavailable
from llama_engine.model import checkpoint_digest
from llama_engine.model.checkpoint_digest import sha256_of
from llama_engine.model.loader import Checkpoint

INPUTS = {"input_ids": [300, 400, 500], "max_tokens": 4, "min_tokens": 4, "receipt": True}


@pytest.fixture(scope="module")
def engine(int8: Checkpoint) -> Engine:
    return engine_of(replace(int8, max_model_len=128))


@pytest.fixture(scope="module")
def receipt(engine: Engine) -> str:
    return receipts_of(engine, INPUTS)[0]


def _refusal(engine: Engine, receipt: str, **inputs: object) -> str:
    with pytest.raises(InvalidRequest) as refused:
        parse(engine, verify_receipt=receipt, **inputs)
    message = str(refused.value)
    assert message.startswith("verify_receipt")
    assert len(message) < 500
    assert message.isprintable()
    return message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("contract", "one", "an object whose contract is 'one'"),
        ("checkpoint", 5, "an object whose checkpoint is 5; it must be a receipt: a text"),
        ("checkpoint", "\ud800", "half a character"),
        ("settings", [1], "an object whose settings is [1]; it must be a receipt: an object of texts"),
        ("settings", {"a": 1}, "an object whose settings is 1"),
        ("settings", {"\ud800": "a"}, "half a character"),
        ("settings", {"a": "\udfff"}, "half a character"),
        ("prompt_ids", "300", "an object whose prompt_ids is '300'"),
        ("prompt_ids", [1.5], "an object whose prompt_ids is a list with 1.5"),
        ("prompt_ids", [], "verify_receipt: input_ids is empty"),
        ("prompt_ids", [5] * 200, "verify_receipt: input_ids is 200 tokens"),
        ("prompt_ids", [99999], "99999"),
        ("output_ids", [], "a receipt of 0 output tokens; it must be one of 1 to max_tokens, 4"),
        ("output_ids", [5] * 100_000, "a receipt of 100000 output tokens"),
        ("output_ids", [3072], "3072"),
        ("output_ids", [True], "a list with True"),
        ("output_ids", [[[[1]]]], "a list with [[[1]]]"),
        ("output_ids", None, "output_ids is None"),
        ("seed", 7, "an object whose seed is 7; it must be a receipt: a text"),
        ("seed", str(2**64), "an object whose seed is '18446744073709551616'"),
        ("parameters", [], "an object whose parameters is []; it must be a receipt: an object of parameters"),
        ("temperature", float("nan"), "an object whose temperature is nan"),
        ("temperature", 1e308, "an object whose temperature is 1e+308"),
        ("max_tokens", 126, "max_tokens is 126; it must be at most 125"),
        ("max_tokens", 4.0, "an object whose max_tokens is 4.0"),
        ("min_tokens", 5, "min_tokens is 5; it must be a whole number, at least 0 and at most 4"),
        ("logit_bias", {"5": float("inf")}, "an object with inf"),
        ("logit_bias", {"5": 1e39}, "an object with 1e+39"),
        ("logit_bias", {"-5": 1.0}, "an object with '-5'"),
        ("logit_bias", {"5000": 1.0}, "5000"),
        ("stop_words", ["\ud800"], "half a character"),
        ("bad_words", ["a"] * 5000, "5000 words"),
        ("guided_decoding_guide", "[a-z]+", "guided_decoding_guide"),
        ("guided_decoding_guide_type", "none", "an object whose guided_decoding_guide_type is 'none'"),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_refused(
    engine: Engine, receipt: str, field: str, value: object, message: str
) -> None:
    content = json.loads(receipt)
    (content if field in content else content["parameters"])[field] = value
    # Surrogates can't be hashed: bounds are checked before the hash.
    changed = json.dumps(content) if "\\u" in json.dumps(value) else rehashed(receipt, **{field: value})
    assert message in _refusal(engine, changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"a": ' * 100_000, "not JSON"),
        ("{}", "'checkpoint' missing or unknown"),
        ('{"contract": ' + "9" * 5000 + "}", "not JSON"),
        (" " * ((1 << 24) + 1), "a text of 16777217 bytes; it must be at most 16777216 bytes"),
    ],
    ids=["empty", "cut", "list", "deep list", "deep object", "no field", "large number", "too long"],
)
def test_a_text_that_is_no_receipt_is_refused(engine: Engine, text: str, message: str) -> None:
    assert message in _refusal(engine, text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["output_ids"].append(5), "it must be unchanged: its content has"),
        (lambda content: content.update(hash=["\n"]), r"an object of the hash ['\n']"),
        (lambda content: content.pop("hash"), "an object of the hash None"),
        (lambda content: content.update(other=1), "'other' missing or unknown"),
        (lambda content: content.pop("seed"), "'seed' missing or unknown"),
        (lambda content: content["parameters"].update({"x\n" * 500: 1}), "missing or unknown; it must be a receipt"),
        (lambda content: content["parameters"].pop("top_k"), "'top_k' missing or unknown"),
    ],
)
def test_other_fields_and_hashes_are_refused(
    engine: Engine, receipt: str, change: Callable[[dict[str, object]], object], message: str
) -> None:
    content = json.loads(receipt)
    change(content)
    assert message in _refusal(engine, json.dumps(content))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"contract": 1}, "a receipt of the 'contract' '1'; it must be of this server's, '2'"),
        ({"checkpoint": "0" * 64}, "a receipt of the 'checkpoint' '0000"),
        ({"settings": {}}, "a receipt of the 'setting product' 'None'; it must be of this server's, '"),
        ({"settings": {"x\n": "1"}}, "a receipt of the 'setting product'"),
    ],
)
def test_a_receipt_of_another_server_is_refused(
    engine: Engine, receipt: str, changed: dict[str, object], message: str
) -> None:
    assert message in _refusal(engine, rehashed(receipt, **changed))


def test_a_setting_that_changes_bits_is_named(receipt: str) -> None:
    two_terms = engine_of(load("int8", int8_terms="2"), int8_terms="2")
    assert "the 'setting int8_terms' 'auto'; it must be of this server's, '2'" in _refusal(two_terms, receipt)


def test_nothing_else_stands_beside_a_receipt(engine: Engine, receipt: str) -> None:
    message = "{} and verify_receipt are both given"
    for name, value in (("seed", 1), ("stream", True), ("receipt", True), ("return_log_probs", True)):
        with pytest.raises(InvalidRequest, match=message.format(name)):
            parse(engine, verify_receipt=receipt, **{name: value})
    assert parse(engine, verify_receipt=receipt, cache_salt="a", priority=3)[0].cache_salt == "a"


def test_a_server_that_reduces_max_tokens_does_not_reduce_a_receipts(engine: Engine, receipt: str) -> None:
    parser = RequestParser(engine.tokenizer, engine.defaults, 6, True, engine.origin)
    with pytest.raises(InvalidRequest, match="max_tokens is 4; it must be at most 3"):
        parser.parse({"verify_receipt": tensor("verify_receipt", [receipt])})


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_inexact_paths_have_no_receipts(receipt: str, quantization: str) -> None:
    engine = engine_of(load(quantization))
    reason = "this server's bits depend on more than the request, so there are no receipts"
    with pytest.raises(InvalidRequest, match=f"receipt is true; it must be false: {reason}"):
        parse(engine, **INPUTS)
    assert f"verify_receipt is given; it must be missing: {reason}" in _refusal(engine, receipt)


def _digest_of(folder: Path) -> str:
    engine = engine_of(load("int8", model=str(folder)), 1)
    assert engine.origin is not None
    return engine.origin().checkpoint


def test_the_digest_is_of_the_files_that_determine_tokens(engine: Engine, tmp_path: Path) -> None:
    folder = save_small(tmp_path / "model", engine.tokenizer)
    first = _digest_of(folder)
    (folder / "README.md").write_text("other")
    assert _digest_of(folder) == first
    config = folder / "generation_config.json"
    config.write_text(config.read_text() + "\n")
    assert _digest_of(folder) != first


def test_a_file_that_cannot_be_read_is_one_clear_error(engine: Engine, tmp_path: Path) -> None:
    folder = save_small(tmp_path / "model", engine.tokenizer)
    small = engine_of(load("int8", model=str(folder)), 1)
    config = folder / "config.json"
    content = config.read_text()
    config.unlink()
    with pytest.raises(GenerationError, match="the checkpoint's files can't be read for receipts"):
        parse(small, **INPUTS)
    config.write_text(content)
    assert verify(small, *receipts_of(small, INPUTS))[0]["equal"]


def test_a_request_does_not_wait_long_for_the_digest(engine: Engine, tmp_path: Path) -> None:
    read, folder = threading.Event(), save_small(tmp_path / "model", engine.tokenizer)
    small = engine_of(load("int8", model=str(folder)), 1)

    def slow(path: Path) -> str:
        read.wait(60)
        return sha256_of(path)

    with patch.object(checkpoint_digest, "sha256_of", slow):
        with patch.object(receipt_origin, "DIGEST_SECONDS", 0.0), pytest.raises(Unavailable, match="try again later"):
            parse(small, **INPUTS)
        read.set()
        deadline = time.monotonic() + 60
        while True:
            try:
                assert receipts_of(small, INPUTS)
                break
            except Unavailable:
                assert time.monotonic() < deadline
                time.sleep(0.01)
