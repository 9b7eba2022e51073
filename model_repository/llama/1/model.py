"""The Triton side of the model: decode the requests, hand them to the engine, encode what comes back.

The only file that imports triton_python_backend_utils. What a request may hold is `llama_engine.requests`' business,
how it is generated `llama_engine.engine`'s.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import triton_python_backend_utils as pb_utils
from llama_engine.checkpoint import choose_device, load_checkpoint
from llama_engine.engine import Completion, Engine, Outcome
from llama_engine.errors import EngineError, InvalidRequest, RequestError, RowFailure
from llama_engine.requests import GenerationRequest, RequestParser
from llama_engine.settings import Settings

BACKEND_PARAMETERS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")
"""Config parameters that belong to Triton's Python backend itself."""

COMPATIBILITY_INPUTS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
"""Inputs of other Triton LLM backends: accepted, and without effect, because those outputs are always there."""

HARMLESS_PARAMETERS = frozenset({"id"})
"""Request parameters that may be ignored: the id of a request to /generate arrives as one."""

_log = logging.getLogger("llama_engine.triton")


class TritonPythonModel:
    """One instance of the model, in a process of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint, allocate the cache, and generate a token to prove that both work."""
        logging.getLogger("llama_engine").addHandler(_TritonLog())
        logging.getLogger("llama_engine").setLevel(logging.INFO)
        try:
            self._load(json.loads(args["model_config"]), _gpu(args))
        except EngineError as error:
            raise pb_utils.TritonModelException(f"llama: {error}") from error

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Answer Triton's batch: a text for every good request, its own error for every bad one."""
        decoded = [self._decode(request) for request in requests]
        good = [row for rows in decoded if not isinstance(rows, RequestError) for row in rows]
        outcomes = iter(self._engine.complete(good))
        return [_encode(rows, outcomes) for rows in decoded]

    def finalize(self) -> None:
        """Say goodbye: nothing is in flight when Triton calls this."""
        _log.info("model unloaded")

    def _load(self, model_config: dict[str, object], gpu: int | None) -> None:
        settings = Settings.parse(_parameters(model_config), os.environ)
        _log.info("settings: %s", settings.describe())
        checkpoint = load_checkpoint(settings, choose_device(settings.device, gpu))
        _log.info("%s", checkpoint.facts.describe())
        if checkpoint.facts.threshold:
            _log.warning(
                "outlier threshold %g: a row's result depends on its batch; LLAMA_INT8_THRESHOLD=0 avoids that",
                checkpoint.facts.threshold,
            )
        self._engine = Engine(checkpoint, settings, settings.slots or int(str(model_config["max_batch_size"])))
        _log.info("%s", self._engine.plan.describe())
        _log.info("a request that leaves an input out gets: %s", self._engine.defaults.describe())
        self._parser = RequestParser(checkpoint.codec, self._engine.defaults, self._engine.max_model_len)
        self._engine.prove()

    def _decode(self, request: pb_utils.InferenceRequest) -> list[GenerationRequest] | RequestError:
        """Return the request's rows, or what is wrong with it."""
        try:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            unknown = sorted(json.loads(request.parameters() or "{}").keys() - HARMLESS_PARAMETERS)
            if unknown:
                # A misspelled input arrives as a parameter; ignoring it would be a silent default.
                raise InvalidRequest(f"{unknown[0]} is no input of this model, and it takes no request parameters")
            if "stream" in inputs and inputs.pop("stream").any():
                raise InvalidRequest("stream is true; it must be false: this config answers in one response")
            for name in COMPATIBILITY_INPUTS:
                inputs.pop(name, None)
            return self._parser.parse(inputs)
        except InvalidRequest as error:
            return error
        except Exception:  # noqa: BLE001 - left to Triton it would fail the whole batch, and show the client a traceback
            _log.exception("a request could not be read; it is answered with an error")
            return RowFailure("the request could not be read; the server's log has the reason")


def _encode(
    rows: Sequence[GenerationRequest] | RequestError, outcomes: Iterator[Outcome]
) -> pb_utils.InferenceResponse:
    """Build the response of one request, taking its rows' outcomes off the front."""
    if isinstance(rows, RequestError):
        return _failure(rows)
    completions: list[Completion] = []
    failures: list[RequestError] = []
    for outcome in islice(outcomes, len(rows)):
        if isinstance(outcome, Completion):
            completions.append(outcome)
        else:
            failures.append(outcome)
    if failures:
        return _failure(failures[0])
    return pb_utils.InferenceResponse(
        [
            _strings("text_output", [completion.text for completion in completions]),
            _strings("finish_reason", [completion.finish_reason for completion in completions]),
            _counts("num_input_tokens", [completion.num_input_tokens for completion in completions]),
            _counts("num_output_tokens", [completion.num_output_tokens for completion in completions]),
        ]
    )


def _failure(error: RequestError) -> pb_utils.InferenceResponse:
    code = pb_utils.TritonError.INVALID_ARG if isinstance(error, InvalidRequest) else pb_utils.TritonError.INTERNAL
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))


def _strings(name: str, values: list[str]) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array([[value.encode()] for value in values], dtype=np.object_))


def _counts(name: str, values: list[int]) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array(values, dtype=np.int32).reshape(-1, 1))


def _parameters(model_config: dict[str, object]) -> dict[str, str]:
    """Return the config's own parameters as text, without those meant for the backend."""
    parameters = model_config.get("parameters", {})
    assert isinstance(parameters, dict)
    return {name: value["string_value"] for name, value in parameters.items() if name not in BACKEND_PARAMETERS}


def _gpu(args: dict[str, str]) -> int | None:
    """Return the GPU that Triton placed this instance on, None for a CPU instance."""
    return int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None


class _TritonLog(logging.Handler):
    """Passes the engine's log records on to Triton's log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record at Triton's nearest level."""
        message = f"llama: {self.format(record)}"
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(message)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(message)
        else:
            pb_utils.Logger.log_info(message)
