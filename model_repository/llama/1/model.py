"""The Triton model: read requests, hand their sequences to the scheduler, answer with the results.

`llama_engine.triton` holds everything else that knows Triton.
"""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import llama_engine.libraries  # noqa: F401 - before anything that imports transformers
import triton_python_backend_utils as pb_utils
from llama_engine.engine.dispatcher import ResponseDispatcher
from llama_engine.engine.engine import Engine
from llama_engine.engine.scheduler import Scheduler
from llama_engine.errors import EngineError, InvalidSettings
from llama_engine.model.loader import load_checkpoint
from llama_engine.model.precision import choose_device
from llama_engine.observability.log import RequestLog, TextFormatter, TritonLogHandler, write_json
from llama_engine.observability.readiness import Readiness
from llama_engine.observability.stats import Stats
from llama_engine.request.end_tokens import describe_end_tokens
from llama_engine.request.parser import RequestParser
from llama_engine.settings import Settings
from llama_engine.triton.adapter_commands import AdapterCommands
from llama_engine.triton.config import (
    QueuePolicy,
    gpu_of,
    instance_name,
    is_decoupled,
    num_instances,
    settings_parameters,
)
from llama_engine.triton.metrics import TritonMetrics
from llama_engine.triton.outputs import release_tensors
from llama_engine.triton.request_reader import RequestReader

if TYPE_CHECKING:
    from llama_engine.observability.traces import Traces

CLOSE_SECONDS = 10.0
"""Seconds for sending the last responses, and then the last metrics, after the last sequence has finished."""

_log = logging.getLogger("llama_engine.triton")


class TritonPythonModel:
    """One instance of the model, in a process of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint, allocate the KV cache, and generate a token to prove that both work."""
        log = pb_utils.Logger
        handler = TritonLogHandler(log.log_info, log.log_warn, log.log_error)
        handler.setFormatter(TextFormatter())
        logging.getLogger("llama_engine").addHandler(handler)
        logging.getLogger("llama_engine").setLevel(logging.INFO)
        try:
            # Load in a temporary thread: on a CPU, PyTorch keeps an OpenMP pool for every thread that computes. With a
            # second pool beside the engine thread's, threads outnumber cores and don't spin, and steps take 20 to 50 %
            # longer.
            with ThreadPoolExecutor(1, "load") as loading:
                loading.submit(self._load, json.loads(args["model_config"]), args).result()
        except EngineError as error:
            raise pb_utils.TritonModelException(f"llama: {error}") from error

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse] | None:
        """Read Triton's batch and schedule its sequences; block as long as `Scheduler.wait_until_admitted` does.

        Under `scheduling: inflight` responses go out through response senders and None is returned. Under
        `scheduling: batch` the responses are returned together, when the last sequence has finished.
        """
        responders = [self._reader.read(request) for request in requests]
        sequences = [sequence for responder in responders for sequence in responder.sequences]
        self._scheduler.add(sequences)
        self._commands.start()
        if self._reader.inflight:
            self._scheduler.wait_until_admitted(sequences)
            return None
        self._scheduler.wait_until_finished(sequences)
        return [responder.build() for responder in responders]

    def is_ready(self) -> bool:
        """Return whether the model would compute a new request. Triton calls this from 26.03 on, with a 5 s timeout."""
        return self._readiness.check()

    def finalize(self) -> None:
        """Shut down within `drain_seconds`, send pending responses and metrics, and end the threads."""
        self._scheduler.stop(self._settings.drain_seconds)
        self._commands.close(CLOSE_SECONDS)
        if not self._dispatcher.close(CLOSE_SECONDS):
            _log.error("some responses could not be sent before the model was unloaded")
        release_tensors()
        self._stats.close(CLOSE_SECONDS)
        if self._traces is not None:
            self._traces.close()
        _log.info("model unloaded")

    def _load(self, model_config: dict[str, Any], args: dict[str, str]) -> None:
        settings = self._settings = Settings.parse(settings_parameters(model_config), os.environ)
        if settings.log_format == "json":
            write_json(logging.getLogger("llama_engine"))
        _log.info("settings: %s", settings.describe())
        decoupled, inflight = is_decoupled(model_config), settings.scheduling == "inflight"
        if decoupled and not inflight:
            raise InvalidSettings(f"scheduling is {settings.scheduling!r}; a decoupled config needs 'inflight'")
        if settings.kv_events != "off" and (instances := num_instances(model_config)) > 1:
            # Triton chooses the instance, so that a router could not send a prompt to the one that has its pages.
            raise InvalidSettings(f"kv_events needs a model of 1 instance; the config's instance_group has {instances}")
        if settings.lora_folder and (instances := num_instances(model_config)) > 1:
            # Each has adapters of its own, and Triton chooses which one loads.
            raise InvalidSettings(f"lora_folder needs 1 instance of the model; the instance_group has {instances}")
        self._traces = _traces(settings)
        engine = _load_engine(settings, gpu_of(args), int(str(model_config["max_batch_size"])))
        queue_policy = QueuePolicy.of(model_config)
        labels = {"model": args["model_name"], "version": args["model_version"]}
        metrics = TritonMetrics(pb_utils.MetricFamily, labels, instance_name(args), engine.description.labels)
        self._stats = Stats(metrics, engine.slots, queue_policy.size)
        self._dispatcher = ResponseDispatcher()
        self._scheduler = Scheduler(engine, self._dispatcher, self._stats, settings.stuck_seconds)
        self._readiness = Readiness(engine, self._scheduler)
        self._commands = AdapterCommands(
            engine.adapters, settings.lora_folder, self._scheduler, self._dispatcher, self._stats
        )
        self._reader = RequestReader(
            engine=engine,
            parser=RequestParser(
                engine.tokenizer,
                engine.defaults,
                engine.max_model_len,
                truncate_max_tokens=settings.truncate_max_tokens == "on",
                digest=engine.description.digest,
                adapters=engine.adapters.loaded,
                generates="generate" in engine.description.tasks,
                embeds="embed" in engine.description.tasks,
            ),
            queue_policy=queue_policy,
            decoupled=decoupled,
            inflight=inflight,
            log=RequestLog(settings.log_requests),
            stats=self._stats,
            dispatcher=self._dispatcher,
            add_command=self._commands.add,
            traces=self._traces,
        )


def _traces(settings: Settings) -> Traces | None:
    if settings.traces == "off":
        return None
    try:
        from llama_engine.observability.traces import Traces
    except ImportError as error:
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise InvalidSettings(f"traces needs OpenTelemetry, the extra tracing: pip install {packages}") from error
    return Traces(settings.traces)


def _load_engine(settings: Settings, gpu: int | None, max_batch_size: int) -> Engine:
    """Load the checkpoint and warm the engine up; log the model, the memory plan and the defaults."""
    loaded = load_checkpoint(settings, choose_device(settings.device, gpu))
    _log.info("%s", loaded.info.describe())
    engine = Engine(loaded, settings, settings.slots or max_batch_size)
    _log.info("%s", engine.plan.describe())
    if loaded.pooling is not None:
        _log.info("embeddings: %s", loaded.pooling.describe())
    _log.info("end tokens: %s", describe_end_tokens(engine.defaults.end_tokens, engine.tokenizer))
    if engine.defaults.ignored:
        _log.warning("fields of the generation config without effect: %s", engine.defaults.describe_ignored())
    _log.info("a request that leaves an input out gets: %s", engine.defaults.describe())
    _log.info("served as %s, description %s", engine.description.name, engine.description.digest)
    engine.warm_up()
    _log.info("%s", engine.describe_decode())
    return engine
