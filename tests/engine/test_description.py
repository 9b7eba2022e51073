"""The description of the served model, which is all that the OpenAI endpoint knows of it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from engine.backend_utils import Request, Response, reading, text
from engine.engines import engine_of
from engine.metrics import RecordingRegistry
from engine.scheduling import SECONDS
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.model.loader import LoadedModel
from llama_engine.observability.stats import Stats
from llama_engine.request.adapter_choice import Adapter
from llama_engine.triton.request_reader import RequestReader
from numpy.typing import NDArray
from safetensors.torch import save_file


@pytest.fixture
def reader(fp32: LoadedModel) -> Iterator[RequestReader]:
    with reading(engine_of(fp32, 2), Stats(RecordingRegistry(), 2), "summary") as reader:
        yield reader


def test_the_description_has_what_the_engine_serves(fp32: LoadedModel) -> None:
    engine = engine_of(fp32, kv_cache_dtype="float32", default_max_tokens="9")
    fields = json.loads(engine.description.document)
    assert fields["format"] == 1
    assert fields["name"] == "pydoc-llama"
    assert fields["max_model_len"] == engine.max_model_len
    assert fields["tasks"] == ["generate"]
    assert fields["end_token_ids"] == [2]
    assert (fields["pooling"], fields["embedding_size"]) == ("", fp32.architecture.hidden)
    assert fields["special_tokens"] == fp32.tokenizer.pretrained.special_tokens_map
    assert fields["chat_templates"] == {"default": fp32.tokenizer.pretrained.chat_template}
    assert fields["defaults"] == engine.defaults.values
    assert fields["checkpoint_defaults"] == ["repetition_penalty", "temperature", "top_p"]
    assert (fields["dtype"], fields["kv_cache_dtype"], fields["batch_invariant"]) == ("float32", "float32", False)


def test_the_digest_is_of_all_fields_but_the_lines_for_people(fp32: LoadedModel) -> None:
    engine = engine_of(fp32)
    description = engine.description
    fields = json.loads(description.document)
    assert engine.plan.describe().endswith(fields.pop("serving")["memory"])
    assert fields.pop("digest") == description.digest
    rest = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    assert hashlib.sha256(rest.encode()).hexdigest() == description.digest


def test_one_changed_weight_changes_the_digest(tmp_path: Path) -> None:
    digests = []
    for value in (1.0, 2.0, 1.0):
        save_file({"model.norm.weight": torch.full((4,), value)}, tmp_path / "model.safetensors")
        digests.append(SavedTensors(tmp_path).digest())
    assert digests[0] == digests[2] != digests[1]


def _response(reader: RequestReader, request: Request) -> Response:
    """Return the only response, for which the engine makes no step."""
    reader.read(cast(Any, request))
    assert reader.dispatcher.close(SECONDS)
    ((response, final),) = request.sent
    assert final
    return response


def _reply(reader: RequestReader, request: Request) -> str:
    """Return the text of the only response."""
    response = _response(reader, request)
    assert response.error is None
    outputs = response.values()
    assert outputs.keys() == {"text_output"}
    return str(outputs["text_output"][0])


def test_an_empty_digest_is_answered_with_the_document(reader: RequestReader) -> None:
    description = reader.engine.description
    assert _reply(reader, Request(description_digest=text(""))) == description.reply("", ())
    adapters = [{"name": "sql", "number": 7, "digest": "d1", "rank": 16}]
    reply = json.loads(description.reply("", [Adapter("sql", 7, "d1", 16, 1)]))
    assert reply == {**json.loads(description.document), "adapters": adapters}


def test_the_current_digest_is_answered_with_itself_alone(reader: RequestReader) -> None:
    digest = reader.engine.description.digest
    reply = json.loads(_reply(reader, Request(description_digest=text(digest))))
    assert reply == {"digest": digest, "adapters": []}


def test_the_description_is_built_under_scheduling_batch(reader: RequestReader) -> None:
    batch = replace(reader, inflight=False)
    response: Any = batch.read(cast(Any, Request(description_digest=text("")))).build()
    assert response.values() == {"text_output": [reader.engine.description.reply("", ())]}


def test_a_request_for_the_description_is_not_logged(reader: RequestReader, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        _reply(reader, Request(description_digest=text("")))
    assert not caplog.records


@pytest.mark.parametrize(
    ("parameters", "inputs", "message"),
    [
        ("", {"max_tokens": np.array([[1]], np.int32)}, "max_tokens is given beside description_digest"),
        ('{"stop": "x"}', {}, "stop is given beside description_digest"),
        ("", {"description_digest": text("", "")}, "description_digest is given in a batch of 2"),
    ],
)
def test_a_request_for_the_description_has_nothing_else(
    reader: RequestReader, parameters: str, inputs: dict[str, NDArray[Any]], message: str
) -> None:
    request = Request(parameters, **{"description_digest": text(""), **inputs})
    assert message in str(_response(reader, request).error)


def test_a_request_prepared_for_another_model_is_refused_before_its_values(reader: RequestReader) -> None:
    request = Request('{"max_tokens": 1000000}', text_input=text("x"), description_digest=text("other"))
    assert str(_response(reader, request).error).startswith("OTHER_MODEL: another model is served")


def test_a_request_prepared_for_this_model_is_computed(reader: RequestReader) -> None:
    digest = reader.engine.description.digest
    parser = replace(reader.parser, digest=digest)
    (request,) = parser.parse({"text_input": text("x"), "description_digest": text(digest)})
    assert request.prompt == "x"
