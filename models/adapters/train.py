"""Train the two adapters of this folder on SmolLM2-135M-Instruct with PEFT: minutes on two cores.

    python -m models.adapters.train

capitals answers in capital letters, json with a JSON object {"answer": …}. Both are LoRA of rank 8 on four of the seven
linear layers of each decoder layer, saved in BF16. The loss is that of the answer's tokens alone. It needs the
extra `dev`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from models.adapters.questions import Example, training_examples
from models.smollm2.fetch import FOLDER, fetch

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
BATCH, LEARNING_RATE = 8, 2e-3
EPOCHS = {"capitals": 6, "json": 3}
"""Words in capital letters have other tokens, of which the model has seen few."""
IGNORED = -100
"""The label of a token without a loss."""


ADAPTERS: dict[str, Callable[[Example], str]] = {
    "capitals": lambda example: example.sentence.upper(),
    "json": lambda example: json.dumps({"answer": example.answer}),
}
"""What each answers."""


def chat(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Return the prompt's tokens."""
    message = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text).input_ids)


def train(name: str) -> None:
    """Train the adapter and write it into the folder of its name."""
    random.seed(0)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    base = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=layers, task_type="CAUSAL_LM"))
    examples = [
        (chat(tokenizer, example.question), tokenizer.encode(ADAPTERS[name](example) + "<|im_end|>"))
        for example in training_examples()
    ]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    steps = EPOCHS[name] * (len(examples) // BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    model.train()
    for _ in range(EPOCHS[name]):
        random.shuffle(examples)
        for start in range(0, len(examples) - BATCH + 1, BATCH):
            batch = examples[start : start + BATCH]
            tokens = [torch.tensor(prompt + answer) for prompt, answer in batch]
            labels = [torch.tensor([IGNORED] * len(prompt) + answer) for prompt, answer in batch]
            # Padding is on the right, where causal attention hides it from the tokens before.
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(
                    input_ids=pad_sequence(tokens, batch_first=True),
                    labels=pad_sequence(labels, batch_first=True, padding_value=IGNORED),
                ).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            print(f"{name}: step {schedule.last_epoch} of {steps}, loss {loss.item():.3f}", flush=True)
    for parameter in trained:
        parameter.data = parameter.data.bfloat16()
    # Else it is this machine's path.
    model.peft_config["default"].base_model_name_or_path = HUB_ID
    folder = Path(__file__).with_name(name)
    model.save_pretrained(str(folder))
    (folder / "README.md").unlink()


if __name__ == "__main__":
    fetch()
    for adapter in ADAPTERS:
        train(adapter)
