"""A list of prompts on its way: who is next, what came back, what to do about errors.

Both clients drive it, one from threads and one from tasks; it knows neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from triton_llama.completion import Completion
from triton_llama.errors import RejectedInputError, TritonLlamaError
from triton_llama.sampling_params import SamplingParams
from triton_llama.tensors import PreparedRequest, prepare


class ManyRequests:
    """The requests of one `generate` call with a list.

    Unless `keep_errors`, nothing new is sent once a request has failed, and the error that `outcomes` raises is the
    first in the order of the prompts. Threads may share it: taking and recording are single operations on a deque
    and on a list's element.
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
                    # Nothing has been sent yet, so the whole list is refused at once.
                    raise

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> tuple[int, PreparedRequest] | None:
        """Return the next request and its place in the list, or None when there is nothing more to send."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def record(self, index: int, outcome: Completion | TritonLlamaError) -> None:
        """Keep what became of the request at that place."""
        self._outcomes[index] = outcome
        if isinstance(outcome, TritonLlamaError):
            outcome.prompt_index = index
            if not self._keep_errors:
                self.stop()

    def stop(self) -> None:
        """Send nothing more."""
        self._waiting.clear()

    def outcomes(self) -> list[Completion | TritonLlamaError]:
        """Return what became of each prompt, in order; call it when nothing is in flight.

        Raises:
            TritonLlamaError: the first failed prompt's, unless errors are kept.
        """
        done = [outcome for outcome in self._outcomes if outcome is not None]
        if not self._keep_errors:
            for outcome in done:
                if isinstance(outcome, TritonLlamaError):
                    raise outcome
        return done
