"""The requests of one list of prompts: which is next, what came back, what an error stops."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from triton_llama.completion import Completion
from triton_llama.errors import RejectedInputError, TritonLlamaError
from triton_llama.sampling_params import SamplingParams
from triton_llama.tensors import PreparedRequest, prepare


class ManyRequests:
    """The requests of one `generate` call with a list; the clients send them, from threads or from tasks.

    Unless `keep_errors`, a failure stops the sending, and `outcomes` raises the first error in the prompts' order.
    Threads may share it: taking and recording are single operations on a deque and on a list's element.
    """

    def __init__(self, prompts: Sequence[str], params: SamplingParams, *, keep_errors: bool) -> None:
        self._keep_errors = keep_errors
        self._outcomes: list[Completion | TritonLlamaError | None] = [None] * len(prompts)
        self._waiting: deque[tuple[int, PreparedRequest]] = deque()
        for index, prompt in enumerate(prompts):
            try:
                self._waiting.append((index, prepare(prompt, params)))
            except RejectedInputError as error:
                self.record(index, error)
                if not keep_errors:
                    # Before anything is sent, so the whole list is refused at once.
                    raise

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> tuple[int, PreparedRequest] | None:
        """Return the next request and its position in the list, or None if there is no more to send."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def record(self, index: int, outcome: Completion | TritonLlamaError) -> None:
        """Keep the outcome of the request at that position."""
        self._outcomes[index] = outcome
        if isinstance(outcome, TritonLlamaError):
            outcome.prompt_index = index
            if not self._keep_errors:
                self.stop()

    def stop(self) -> None:
        """Send no more requests."""
        self._waiting.clear()

    def outcomes(self) -> list[Completion | TritonLlamaError]:
        """Return each prompt's outcome, in order; call it when no request is in flight.

        Raises:
            TritonLlamaError: the first failed prompt's, unless errors are kept.
        """
        done = [outcome for outcome in self._outcomes if outcome is not None]
        if not self._keep_errors:
            for outcome in done:
                if isinstance(outcome, TritonLlamaError):
                    raise outcome
        return done
