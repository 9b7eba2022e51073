"""The engine: each step prefills prompts, decodes a token of each sequence or several, and removes finished ones.

A sequence's tokens depend on its own prompt, parameters and seed. Where products are in floats, or on a GPU, other
sequences of the batch can change a logit's last bits, and so a near tie (the table in `model.load_plan`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property

import torch

from llama_engine.engine.adapters import Adapters, lora_limits
from llama_engine.engine.cuda_graphs import Capture, capture_graphs
from llama_engine.engine.decode import DecodeBatch, DecodeStep
from llama_engine.engine.drafts import Draft, Drafter
from llama_engine.engine.events import Result
from llama_engine.engine.failures import Isolation, log_name
from llama_engine.engine.kv_events import KvEvents
from llama_engine.engine.memory_plan import plan_memory
from llama_engine.engine.page_manager import CacheCounts, PageManager
from llama_engine.engine.pooler import Pooler
from llama_engine.engine.preemption import extend_pages
from llama_engine.engine.prefill import Prefill
from llama_engine.engine.sequence import Sequence, Status
from llama_engine.engine.sequence_builder import SequenceBuilder
from llama_engine.engine.step_result import StepResult
from llama_engine.errors import GenerationError
from llama_engine.guides.compiler import Guides
from llama_engine.model.description import ModelDescription
from llama_engine.model.loader import LoadedModel
from llama_engine.request.defaults import GenerationDefaults
from llama_engine.request.end_tokens import find_end_tokens
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.sampling.sampler import FAILED, Sampler, failure_of
from llama_engine.settings import Settings


class Engine:
    """Generates completions with one model. Not thread-safe, except for `builder`, `guides` and `adapters`."""

    def __init__(self, loaded: LoadedModel, settings: Settings, slots: int) -> None:
        """Allocate the KV cache and the batch, and load adapters. Raises OutOfMemoryPlan, CheckpointError."""
        self._device = loaded.info.device
        self.tokenizer = loaded.tokenizer
        end_tokens = find_end_tokens(loaded.generation_config, loaded.config, loaded.tokenizer)
        self.defaults = GenerationDefaults.from_config(
            loaded.generation_config, settings.default_max_tokens, end_tokens, loaded.architecture.vocabulary
        )
        self.plan = plan_memory(loaded, settings, slots)
        self.plan.check()
        shape = self.plan.shape
        self.max_model_len, self.slots = shape.max_model_len, slots
        """Maximum tokens of prompt + completion, and maximum number of sequences in the engine."""
        self._model = loaded.runner(shape, self.plan.graphs, lora_limits(settings))
        self.adapters = Adapters(self._model, loaded.architecture, settings)
        """The LoRA adapters that requests can name."""
        self.kv_events = None if settings.kv_events == "off" else KvEvents(settings.kv_events, shape.page_size)
        """Publishes the prefixes in the KV cache; None if that is off."""
        caching = settings.prefix_cache == "on"
        self._pages = PageManager(shape, self._model, caching, self.kv_events)
        self._batch = DecodeBatch(slots, loaded.architecture.vocabulary, self._device, self._pages)
        self._sampler = Sampler(self._batch.sampling, self.defaults.end_tokens)
        self._isolation = Isolation()
        pooler = None if loaded.pooling is None else Pooler(self._model, loaded.pooling)
        self._prefill = Prefill(self._model, self._batch, self._pages, settings.prefill_tokens, self._isolation, pooler)
        self._decode = DecodeStep(self._model, self._sampler, self._batch, self._isolation)
        self._drafter: Drafter | None = None
        if settings.speculation in ("on", "auto" if loaded.info.batch_invariant else "on"):
            self._drafter = Drafter(self.tokenizer, self._pages, min(slots, self.max_model_len - 1), caching)
        self.builder = SequenceBuilder(
            self.tokenizer.vocabulary, frozenset(end_tokens), self._device, settings.stream_interval
        )
        self.guides = Guides(self.tokenizer, self.defaults.end_tokens, finds_forced=self._drafter is not None)
        self._wants_graphs = settings.cuda_graphs in ("on", "auto" if self._device.type == "cuda" else "on")
        self._loaded = loaded
        self._result = StepResult()

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the engine, in prefill or decoding."""
        return len(self._batch) + len(self._prefill)

    @cached_property
    def description(self) -> ModelDescription:
        """The description of the served model for its clients."""
        memory = self.plan.describe().removeprefix("memory plan ")
        return ModelDescription.of(self._loaded, self.plan.shape, self.defaults, memory)

    def describe_decode(self) -> str:
        """Return one log line: the product, the attention, and whether decode steps replay CUDA graphs."""
        graphs = self._decode.graphs
        steps = f"replayed as {graphs.count} CUDA graphs" if graphs else "launched"
        attention = ""
        if self._device.type == "cuda":
            attention = ", FlashAttention" if self._loaded.attention else ", attention with masks"
        return f"decode steps: {self._loaded.info.computation}{attention}, {steps}"

    def take_cache_counts(self) -> CacheCounts:
        """Return the pages by state, and what was evicted, looked up and found since the last step or call."""
        return self._pages.take_counts()

    def can_admit(self, sequence: Sequence) -> bool:
        """Return whether a slot is free, and pages for the sequence besides those that queued sequences need.

        Running ones keep a page each to grow into. An engine without sequences admits any.
        """
        if not self.num_sequences or self.num_sequences == self.slots:
            return not self.num_sequences
        available, starting = self._pages.num_available - self._prefill.headroom(), [*self._prefill.queue, sequence]
        # Looking prefixes up takes time, and mostly there are enough pages without.
        if sum(self.plan.shape.pages_of(each.num_tokens) for each in starting) <= available:
            return True
        return sum(map(self._pages.num_new_pages, starting)) <= available

    def has_pages(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether pages are available for all tokens of waiting sequences. Any thread may call it."""
        pages = sum(self.plan.shape.pages_of(each.num_tokens) + 1 for each in [*self._prefill.queue, *sequences])
        return pages + self.num_sequences <= self._pages.num_available

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence for prefill in a free slot, which must exist: WAITING → PREFILL."""
        assert self.num_sequences < self.slots, "no slot is free"
        assert sequence.status is Status.WAITING, sequence.status
        sequence.admit()
        self._prefill.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence without setting its result, and free its KV slot and pages.

        No effect on a sequence that is not in the engine. If this raises, all sequences fail and are removed.
        """
        if self._prefill.remove(sequence) or sequence not in self._batch.sequences:
            return
        try:
            self._batch.remove(self._batch.sequences.index(sequence))
        except Exception as error:
            self._isolation.record(error, "freeing a slot")
            self._fail_all()
            raise

    @torch.inference_mode()
    def step(self, on_first_tokens: Callable[[], None] = lambda: None) -> StepResult:
        """Prefill prompts within the budget, then sample the next token of every sequence whose prompt is computed.

        on_first_tokens: called on a CPU when new sequences have their first tokens and the others have not.

        Never raises: a failed computation is repeated in parts, and a sequence that fails alone gets a GenerationError.
        A failure that can't be isolated fails every sequence.
        """
        result = self._result = StepResult()
        if self._device.type == "cuda":
            # bitsandbytes launches on the thread's current device, not on the tensors' device.
            torch.cuda.set_device(self._device)
        try:
            result.preempted = extend_pages(self._pages, self._batch, self._prefill)
            decoding = len(self._batch)
            prefilled = self._prefill_prompts()
            # On a GPU a step waits for the device once.
            if prefilled and decoding and self._device.type == "cpu" and self._decode.graphs is None:
                self._append(range(decoding, len(self._batch)), self._decode.first_tokens(decoding, prefilled))
                prefilled = []
                on_first_tokens()
            if self._batch.sequences:
                self._decode_tokens(decoding, prefilled)
                result.decoded = decoding
                self._remove_finished()
        except Exception as error:  # noqa: BLE001 - any failure: every sequence must get a result
            self._isolation.record(error, f"a step over {self.num_sequences} sequences")
            self._fail_all()
        result.errors, self._isolation.errors = self._isolation.errors, 0
        result.term_counts = self._model.take_term_counts()
        result.cache = self.take_cache_counts()
        if self.kv_events is not None:
            result.dropped_kv_events = self.kv_events.take_dropped()
        return result

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Result]:
        """Generate until all requests finish; return the results in order. Raises RequestError for a bad guide."""
        sequences = [self.builder.build(request) for request in requests]
        for sequence in sequences:
            if sequence.status is Status.WAITING_FOR_GUIDE:
                request = sequence.request
                guide = self.guides.start(request.guided_decoding_guide_type, request.guided_decoding_guide)
                sequence.follow_guide(guide.result())
        waiting = deque(sequences)
        while waiting or self.num_sequences:
            while waiting and self.can_admit(waiting[0]):
                self.add(waiting.popleft())
            self.step()
        results = [sequence.result for sequence in sequences if sequence.result is not None]
        assert len(results) == len(sequences)
        return results

    def warm_up(self) -> None:
        """Capture CUDA graphs, then run a prefill and a decode step. Raises GenerationError if that fails.

        On a GPU the prompt has the maximum length, which tests that the memory plan's reserve suffices. On a CPU, where
        that could take minutes, the prompt has one token. Exceptions of a kernel's first use are passed on.
        """
        if self._device.type == "cuda":
            self._model.warm_up()
        self.capture_graphs()
        width = max(self.max_model_len - 2, 1) if self._device.type == "cuda" else 1
        # The prefill yields the first token and a decode step the second, if max_model_len has room for it.
        count = min(2, self.max_model_len - width)
        request = GenerationRequest(
            prompt="", prompt_tokens=(0,) * width, max_tokens=count, min_tokens=count, cache_salt="warm-up"
        )
        result = self.generate([request])[0]
        if isinstance(result, GenerationError):
            raise result
        if self._drafter is not None:
            longest = GenerationRequest(prompt="", prompt_tokens=(0,) * self._drafter.limit, cache_salt="warm-up")
            self._drafter.measure(self._model, self.builder.build(longest))

    def capture_graphs(self, capture: Capture | None = None) -> None:
        """Capture decode steps as CUDA graphs if the setting `cuda_graphs` enables it. The engine must be empty.

        capture: how to capture; None captures on the device. If capture fails, decode steps run without graphs.
        """
        assert not self.num_sequences, "sequences are in the engine"
        if self._wants_graphs:
            self._decode.graphs = capture_graphs(
                self._loaded, self.plan.shape, self._model, self._sampler, self._batch, capture
            )

    def _prefill_prompts(self) -> list[torch.Tensor]:
        """Run a prefill pass and add completely computed prompts to the batch; return their last hidden states."""
        prefilled = self._prefill.step()
        self._result.prefill_tokens = prefilled.tokens
        self._result.finished += prefilled.finished
        if prefilled.sequences:
            self._batch.add(prefilled.sequences)
        self._prefill.commit()
        return prefilled.hidden

    def _decode_tokens(self, decoding: int, prefilled: list[torch.Tensor]) -> None:
        """Append the next tokens of the sequences without one in this step, and those that their drafts had right."""
        drafts: dict[Sequence, Draft] = {}
        if self._drafter is not None:
            room = self._drafter.limit - len(self._batch)
            try:
                drafts = self._drafter.guess(self._batch.sequences[:decoding], room)
            except Exception as error:  # noqa: BLE001 - decoding works without drafts
                self._isolation.record(error, f"drafting for {log_name(self._batch.sequences[:decoding])}")
            drafts = self._drafter.choose(drafts, decoding, room)
        began = time.monotonic()
        tokens = self._decode.run(decoding, prefilled, drafts)
        self._append(range(len(tokens)), tokens)
        sampled = self._result.sampled
        while verified := self._decode.verify():
            self._append(*verified)
        self._result.verified = self._result.sampled - sampled
        if self._drafter is not None:
            # A GPU may still compute the step's prompts.
            other_work = prefilled or (self._device.type == "cuda" and self._result.prefill_tokens)
            self._drafter.record(drafts, decoding, math.nan if other_work else time.monotonic() - began)
        self._result.drafts = list(drafts.values())

    def _append(self, indices: Iterable[int], tokens: torch.Tensor) -> None:
        """Append the tokens, [batch], of the sequences at these batch indices."""
        # tolist() waits for the device; everything before is asynchronous.
        for index, token in zip(indices, tokens.tolist(), strict=True):
            sequence = self._batch.sequences[index]
            try:
                if token == FAILED:
                    sequence.finish(failure_of(sequence))
                    continue
                token_bytes = self.tokenizer.vocabulary.token_bytes[token]
                self._result.sampled += 1
                sequence.append(token, token_bytes)
                self._pages.cache_pages(sequence)
            except Exception as error:  # noqa: BLE001 - any failure: only this sequence gets an error
                self._isolation.record(error, f"appending token {token} to {log_name([sequence])}")
                sequence.fail()

    def _remove_finished(self) -> None:
        # Iterate backwards, so that the sequence that moves to a freed index has already been visited.
        for index in reversed(range(len(self._batch))):
            sequence = self._batch.sequences[index]
            if sequence.status is Status.FINISHED:
                self._result.finished.append(sequence)
                if self._drafter is not None:
                    self._drafter.add_finished(sequence)
                self._batch.remove(index)

    def _fail_all(self) -> None:
        """Fail every sequence and clear the slots."""
        for sequence in dict.fromkeys([*self._batch.sequences, *self._prefill.sequences]):
            if sequence.status is not Status.FINISHED:
                sequence.fail()
            if sequence not in self._result.finished:
                self._result.finished.append(sequence)
        self._batch.clear()
        self._prefill.clear()
