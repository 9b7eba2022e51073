"""Greedy decoding with transformers' `generate()` on single prompts: the reference of the exactness tests."""

from dataclasses import dataclass, field

import torch
from llama_engine.model.loader import Checkpoint
from transformers import LlamaForCausalLM
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

TIE = 1e-4
"""Largest difference of the two best logits at the first different token that promise 2 excuses."""


@dataclass
class GreedyReference:
    """generate() on single prompts, each run once with `longest` tokens: greedy tokens are prefix-stable."""

    checkpoint: Checkpoint
    longest: int
    penalty: float = 1.0
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def tokens(self, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        """Return the new tokens of generate(max_new_tokens=max_tokens)."""
        assert max_tokens <= self.longest
        if prompt not in self._known:
            ids = torch.tensor([prompt], device=self._model.device)
            with torch.inference_mode():
                full = self._model.generate(  # type: ignore[misc]  # transformers annotates self with a protocol
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=self.longest,
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    repetition_penalty=self.penalty,
                )
            self._known[prompt] = full[0, len(prompt) :].tolist()
        return self._known[prompt][:max_tokens]

    def is_tie(self, prompt: tuple[int, ...], ours: list[int], theirs: list[int]) -> bool:
        """Return whether the two best logits at the first different token tie."""
        same = next(index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
        ids = torch.tensor([[*prompt, *theirs[:same]]], device=self._model.device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids).logits[:, -1].float()
        best = RepetitionPenaltyLogitsProcessor(self.penalty)(ids, logits)[0].topk(2).values
        return float(best[0] - best[1]) <= TIE

    @property
    def _model(self) -> LlamaForCausalLM:
        return self.checkpoint.model
