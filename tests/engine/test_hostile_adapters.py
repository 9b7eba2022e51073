"""A damaged adapter is read or refused in one line: no other exception, no crash, no hang, bounded memory.

One that is read changes no completion of the base model.
"""

import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from engine.damages import DAMAGED_CHECKPOINTS, DAMAGES, memory_of_at_most
from engine.engines import completions, engine_of, load, with_tokens_as_text
from engine.families import MAX_MODEL_LEN, save_family
from engine.lora_adapters import architecture_of, change_config, save_adapter
from engine.prompts import request_of
from llama_engine.checkpoint.lora import read_adapter
from llama_engine.errors import CheckpointError
from notes import Note

MAX_MEMORY = 300 << 20
PATTERNS = ("(", "(?R)", "[[a]]", "a{e<=9}", "(a+)+", "x{4000000000}", "q_proj)|(k_proj", r"\p{L}*", "(" * 5000)
FIELDS = ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern")


def _change_pattern(folder: Path, draw: random.Random) -> str:
    """Replace a field of the config by a regular expression, or by a number for one."""
    field, pattern = draw.choice(FIELDS), draw.choice(PATTERNS)
    change_config(folder, **{field: {pattern: 4} if field.endswith("pattern") else pattern})
    return f"{field}={pattern[:40]!r}"


@pytest.mark.timeout(1200)
def test_damaged_adapters_are_read_or_refused(tmp_path: Path, note: Note) -> None:
    base, count = save_family(tmp_path / "llama", "llama"), 5 * DAMAGED_CHECKPOINTS
    save_adapter(base, tmp_path / "adapter", {"r": 4, "target_modules": ["q_proj", "down_proj"]})
    (tmp_path / "adapter" / "README.md").unlink()
    architecture, outcomes = architecture_of(base), Counter[str]()
    checkpoint = with_tokens_as_text(load("int8", model=str(base), max_model_len=str(MAX_MODEL_LEN)))
    engine, request = engine_of(checkpoint, 2, lora_folder=str(tmp_path)), request_of(checkpoint, 1, 20, 8)
    expected = completions(engine, [request])
    with memory_of_at_most(MAX_MEMORY):
        for seed in range(count):
            draw, message = random.Random(seed), ""
            copy = Path(shutil.copytree(tmp_path / "adapter", tmp_path / "copy"))
            damage = draw.choice((*DAMAGES, *[_change_pattern] * 3))(copy, draw)
            try:
                read_adapter(copy, architecture, 16)
            except CheckpointError as error:
                message = str(error)
            outcomes["refused" if message else "read"] += 1
            if not message and outcomes["read"] % 50 == 1:
                engine.adapters.load("damaged", 0, copy)
                (adapter,) = engine.adapters.loaded()
                # The adapter's own sequence may fail.
                results = engine.generate([replace(request, adapter=adapter), request])
                assert results[1:] == expected, (seed, damage)
                engine.adapters.free(engine.adapters.remove("damaged"))
            shutil.rmtree(copy)
            assert not message or (message.isprintable() and len(message) < 1000), (seed, damage)
    note(f"{count} damaged adapters: {outcomes['refused']} refused, {outcomes['read']} read")
    assert count // 3 < outcomes["refused"] < count
