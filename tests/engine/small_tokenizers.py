"""Small tokenizers; one is Llama 2's kind: U+2581 for a space, bytes for characters without a token."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

WORDS = ["▁def", "▁the", "▁class", "ing", "▁é", "▁", "▁▁▁▁", "\n", "lambda", *"()abcdeö🙂"]


def wrapped(backend: Tokenizer, **special_tokens: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special_tokens)


def llama2_like() -> PreTrainedTokenizerFast:
    """Ids: <unk> <s> </s>, 256 bytes, the words, and <tool>, an added token that is text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    backend = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = wrapped(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer
