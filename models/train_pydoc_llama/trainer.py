"""The training loop's state and one step of it, without files, signals or progress bars.

Each of two threads takes half of every batch, on one CPU thread: they synchronize once a step. With all cores in every
matrix product they would synchronize thousands of times a step and, on a busy machine, each time wait for the core that
is in use elsewhere (measured: 11 s instead of 2 s a step).
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor
from transformers import LlamaForCausalLM

from models.train_pydoc_llama.batches import BatchSource
from models.train_pydoc_llama.hyperparameters import Plan
from models.train_pydoc_llama.muon import Muon


class Trainer:
    """Holds what changes from step to step; `state_dict` and `load_state_dict` carry all of it."""

    def __init__(self, model: LlamaForCausalLM, batches: BatchSource, plan: Plan) -> None:
        self.model, self.batches, self.plan = model, batches, plan
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.log: list[dict[str, float]] = []
        self.recent_losses: list[float] = []
        matrices: list[Tensor] = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
        self.workers = ThreadPoolExecutor(plan.workers)
        self.muon = Muon(matrices, plan.momentum, plan.weight_decay, self.workers)
        self.adam = torch.optim.AdamW(others, lr=plan.other_lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.replicas = [model] + [copy.deepcopy(model) for _ in range(plan.workers - 1)]
        for replica in self.replicas[1:]:
            for mine, shared in zip(replica.parameters(), model.parameters(), strict=True):
                mine.data = shared.data  # the weights are shared, the gradients are not

    def train_step(self) -> float:
        """Update with one batch; return its loss in nats per token and add it to `recent_losses`."""
        factor = self.plan.lr_factor(self.step)
        for group in self.adam.param_groups:
            group["lr"] = self.plan.other_lr * factor
        ids = self.batches.next_batch(self.plan.row_length(self.step))
        losses = list(self.workers.map(_backward, self.replicas, ids.chunk(len(self.replicas))))
        self._average_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.gradient_clip)
        self.muon.step(self.plan.matrix_lr * factor)
        self.adam.step()
        for replica in self.replicas:
            replica.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += ids.numel()
        self.recent_losses.append(sum(losses) / len(losses))
        return self.recent_losses[-1]

    def _average_gradients(self) -> None:
        for same in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            gradients = [parameter.grad for parameter in same if parameter.grad is not None]
            same[0].grad = torch.stack(gradients).mean(dim=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run that resumes."""
        return {
            "model": self.model.state_dict(),
            "muon": self.muon.averages,
            "adam": self.adam.state_dict(),
            "position": list(self.batches.position()),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "log": self.log,
            "recent_losses": self.recent_losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.model.load_state_dict(state["model"])
        for average, saved in zip(self.muon.averages, state["muon"], strict=True):
            average.copy_(saved)
        self.adam.load_state_dict(state["adam"])
        self.batches.skip_to(*state["position"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.log, self.recent_losses = state["log"], state["recent_losses"]


def _backward(replica: LlamaForCausalLM, ids: Tensor) -> float:
    torch.set_num_threads(1)  # a setting of the calling thread
    replica.train()
    logits = replica(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.autograd.backward(loss)
    return loss.item()
