"""The tokens that end a completion, whatever part of a checkpoint names them."""

from dataclasses import replace
from pathlib import Path

import pytest
from engine.engines import completions, engine_of
from llama_engine.checkpoint.config import read_config
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import LoadedModel
from llama_engine.request.end_tokens import describe_end_tokens, find_end_tokens
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.tokenizer import Tokenizer, Vocabulary
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

TOKENS = ["a", "<s>", "</s>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>"]


def _tokenizer(template: str | dict[str, str] | None = None, **special: str) -> Tokenizer:
    backend = FastTokenizer(models.BPE({token: number for number, token in enumerate(TOKENS)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(TOKENS[1:5])
    # The last one is text.
    backend.add_tokens(TOKENS[5:])
    pretrained = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)
    return Tokenizer(pretrained, Vocabulary.from_tokenizer(pretrained, len(TOKENS)))


def _ends(tokenizer: Tokenizer, config: object = None, generation: object = None) -> dict[int, str]:
    in_config = LlamaConfig()
    in_config.eos_token_id = config  # type: ignore[assignment]  # a file may hold anything
    in_generation = GenerationConfig()
    in_generation.eos_token_id = generation
    return dict(find_end_tokens(in_generation, in_config, tokenizer))


def test_end_tokens_are_those_of_all_parts_with_the_first_source() -> None:
    tokenizer = _tokenizer("{{ x }}<|im_end|>", eos_token="<|endoftext|>")
    ends = _ends(tokenizer, 1, [2, 1])
    assert ends == {1: "config", 2: "generation config", 3: "tokenizer", 4: "chat template"}
    described = "1 '<s>' (config), 2 '</s>' (generation config), 3 '<|endoftext|>' (tokenizer), "
    assert describe_end_tokens(ends, tokenizer) == f"{described}4 '<|im_end|>' (chat template)"


def test_any_named_template_ends_turns() -> None:
    assert _ends(_tokenizer({"default": "", "tool_use": "<|im_end|>"})) == {4: "chat template"}


@pytest.mark.parametrize("template", ["<|im_start|>", "<s>a</s>", "<|eot_id|>"])
def test_a_template_adds_only_known_special_tokens_in_it(template: str | None) -> None:
    assert _ends(_tokenizer(template)) == {}


@pytest.mark.parametrize("value", [-1, True, [2, 6]])
def test_a_generation_config_with_an_id_beyond_the_vocabulary_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json, or .*: eos_token_id is .*must be below 6"):
        _ends(_tokenizer(), generation=value)


def test_an_id_of_the_config_beyond_the_vocabulary_is_left_out() -> None:
    assert _ends(_tokenizer(), [2, 99]) == {2: "config"}


def test_a_completion_ends_at_a_token_that_only_the_tokenizer_names(fp32: LoadedModel) -> None:
    (end,) = fp32.tokenizer.encode_inside("</s>")
    unnamed = LlamaConfig(**{**fp32.config.to_dict(), "eos_token_id": 0})
    changed = replace(fp32, config=unnamed, generation_config=GenerationConfig(eos_token_id=0))
    request = GenerationRequest(prompt="", prompt_tokens=(1,), max_tokens=9, logit_bias=((end, 100.0),))
    (completion,) = completions(engine_of(changed), [request])
    assert (completion.finish_reason, completion.num_output_tokens) == ("stop", 1)


def test_a_config_without_an_end_token_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(tmp_path, "it").eos_token_id is None
