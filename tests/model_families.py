"""The tokenizers and templates of model families, without weights; `engine/families.py` has small models of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).resolve().parent / "chat_templates"
_WORD = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_level() -> Tokenizer:
    """Llama 3's, Qwen's, Tekken's kind: bytes as printable characters, a digit a token."""
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**alphabet, "Ġa": 256}, [("Ġ", "a")]))
    split = pre_tokenizers.Split(_WORD, "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_fallback(normalizer: normalizers.Normalizer, *decoder: decoders.Decoder) -> Tokenizer:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = {piece: index for index, piece in enumerate(["<unk>", *bytes_, "▁", *map(chr, range(33, 127)), "▁a"])}
    tokenizer = Tokenizer(models.BPE(pieces, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizer
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *decoder])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: U+2581 for a space, and one before the text."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _byte_fallback(spaces, decoders.Strip(" ", 1, 0))


def gemma() -> Tokenizer:
    """Gemma's kind: Llama 2's without the space before the text."""
    return _byte_fallback(normalizers.Replace(" ", "▁"))


@dataclass(frozen=True)
class Family:
    """One family. special: its tokens, the BOS first if `bos`. text: tokens that decode to themselves.

    ends: eos_token_id of generation_config.json, by name. adds_bos: the tokenizer puts the BOS in front.
    """

    name: str
    kind: Callable[[], Tokenizer]
    special: tuple[str, ...]
    ends: tuple[str, ...]
    text: tuple[str, ...] = ()
    model_type: str = "llama"
    tokenizer_class: str = "PreTrainedTokenizerFast"
    bos: bool = True
    adds_bos: bool = False

    def save(self, folder: Path) -> Path:
        """Write tokenizer, configs and template as a checkpoint has them."""
        backend = self.kind()
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in self.special])
        backend.add_tokens([AddedToken(token, normalized=False) for token in self.text])
        bos = self.special[0] if self.bos else None
        if bos and self.adds_bos:
            number = backend.token_to_id(bos)
            backend.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, number)])
        names = {"bos_token": bos, "eos_token": self.ends[0]}
        PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names).save_pretrained(
            folder
        )
        config = json.loads((folder / "tokenizer_config.json").read_text())
        _write(folder / "tokenizer_config.json", {**config, "tokenizer_class": self.tokenizer_class})
        size = {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 1024}
        _write(folder / "config.json", {"model_type": self.model_type, **size})
        ends = [backend.token_to_id(token) for token in self.ends]
        _write(folder / "generation_config.json", {"eos_token_id": ends})
        (folder / "chat_template.jinja").write_bytes((TEMPLATES / f"{self.name}.jinja").read_bytes())
        return folder


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))


_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
_LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_GEMMA = ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>")
_PHI = ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
_R1 = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")

FAMILIES = [
    Family("llama-2", sentencepiece, ("<s>", "</s>"), ("</s>",), (), "llama", "LlamaTokenizer", adds_bos=True),
    Family(
        "llama-3.1",
        byte_level,
        (*_LLAMA_3, "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        adds_bos=True,
    ),
    Family("mistral", sentencepiece, _MISTRAL, ("</s>",), (), "mistral", "LlamaTokenizer", adds_bos=True),
    Family("ministral", byte_level, _MISTRAL, ("</s>",), model_type="ministral", adds_bos=True),
    Family("qwen2.5", byte_level, _QWEN, ("<|im_end|>", "<|endoftext|>"), _CALL, "qwen2", "Qwen2Tokenizer", bos=False),
    Family(
        "qwen3",
        byte_level,
        _QWEN,
        ("<|im_end|>", "<|endoftext|>"),
        (*_CALL, *_THINK),
        "qwen3",
        "Qwen2Tokenizer",
        bos=False,
    ),
    Family("smollm3", byte_level, ("<|begin_of_text|>", *_QWEN[1:]), ("<|im_end|>",), (*_CALL, *_THINK), "smollm3"),
    Family(
        "phi-3",
        sentencepiece,
        ("<s>", *_PHI),
        ("<|end|>", "<|assistant|>", "<|endoftext|>"),
        (),
        "phi3",
        "LlamaTokenizer",
    ),
    Family("phi-4-mini", byte_level, _PHI, ("<|end|>", "<|endoftext|>"), (), "phi3", "GPT2Tokenizer"),
    Family(
        "granite-3.3",
        byte_level,
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        ("<|end_of_text|>",),
        (),
        "granite",
        "GPT2Tokenizer",
    ),
    Family("olmo-2", byte_level, ("<|endoftext|>",), ("<|endoftext|>",), (), "olmo2", "GPT2Tokenizer"),
    Family(
        "seed-oss",
        byte_level,
        ("<seed:bos>", "<seed:eos>", "<seed:pad>", "<seed:think>", "</seed:think>"),
        ("<seed:eos>",),
        (),
        "seed_oss",
    ),
    Family("gemma-2", gemma, _GEMMA, ("<eos>", "<end_of_turn>"), (), "gemma2", "GemmaTokenizer", adds_bos=True),
    Family("gemma-3", gemma, _GEMMA, ("<eos>", "<end_of_turn>"), (), "gemma3_text", "GemmaTokenizer", adds_bos=True),
    Family(
        "deepseek-r1-distill-llama",
        byte_level,
        _R1,
        _R1[1:],
        ("<｜User｜>", "<｜Assistant｜>", *_THINK),
        "llama",
        "LlamaTokenizerFast",
        adds_bos=True,
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}
