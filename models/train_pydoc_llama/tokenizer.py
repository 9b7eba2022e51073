"""The tokenizer: byte-level BPE that writes any UTF-8 text and reads it back exactly, with Llama-2's chat template."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

VOCABULARY = 3072
# The ids of Llama-2's tokenizer; <pad> comes after them so that padding is never mistaken for the end of a text.
UNK, BOS, EOS, PAD = "<unk>", "<s>", "</s>", "<pad>"

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def train_tokenizer(texts: Iterable[str], context: int) -> PreTrainedTokenizerFast:
    """Learn the merges from `texts`; `context` is the model's longest sequence in tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in (UNK, BOS, EOS, PAD)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, begin)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer as AutoTokenizer loads it; a TypeError if that is not the kind that was saved."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(f"{folder}: expected a PreTrainedTokenizerFast, got {type(tokenizer).__name__}")
    return tokenizer
