"""A checkpoint's configuration, read from config.json.

For a Llama, `LlamaConfig` replaces transformers' class, whose module imports TorchDynamo, torch.distributed and SymPy:
0.8 s of CPU time at every start. Reading, conversion and validation are inherited from transformers'
`PreTrainedConfig`. Other model types take transformers' own classes.
"""

from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from llama_engine.bounds import show
from llama_engine.checkpoint.architecture import FAMILIES
from llama_engine.checkpoint.config_bounds import check_heads, check_values
from llama_engine.errors import CheckpointError, one_line

USED = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "hidden_activation", "max_position_embeddings",
    "original_max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "attention_bias",
    "attention_out_bias", "mlp_bias", "head_dim", "sliding_window", "layer_types",
    "no_rope_layers", "embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier",
    "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention",
}  # fmt: skip
"""The fields that `Architecture` and RoPE's tables are computed from."""

IRRELEVANT = {
    "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp",
    "attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "use_sliding_window", "max_window_layers",
    "no_rope_layer_interval", "_sliding_window_pattern",
}  # fmt: skip
"""Fields for training, for generation, or from which a used field has been computed."""


def read_config(folder: Path, name: str) -> PreTrainedConfig:
    """Return the config of a supported model type. name: the checkpoint's, for error messages.

    For a Llama the result has the fields of transformers' LlamaConfig, but is not an instance of it. Raises
    CheckpointError for another model type and for an invalid value.
    """
    if not (folder / "config.json").exists():
        raise CheckpointError(f"can't load {name}: it has no config.json")
    try:
        values, _ = PreTrainedConfig.get_config_dict(folder)
        kind = values.get("model_type")
        if not isinstance(kind, str | None):
            raise CheckpointError(f"can't load {name}: config.json: model_type is {show(kind)}; it must be a text")
        if kind in FAMILIES:
            check_values(values, f"{name}: config.json")
        config = _config(folder, name, values, kind)
        check_heads(config, f"{name}: config.json")
        # The class's default is a token of another vocabulary.
        config.eos_token_id = values.get("eos_token_id")
    except CheckpointError:
        raise
    except Exception as error:
        # The exceptions of transformers and huggingface_hub have no common base class.
        raise CheckpointError(f"can't load {name}: config.json: {one_line(error)}") from error
    return config


def _config(folder: Path, name: str, values: dict[str, Any], kind: str | None) -> PreTrainedConfig:
    if kind == LlamaConfig.model_type:
        return LlamaConfig.from_pretrained(folder)
    # Imported here because the Auto classes are slow to import and a Llama doesn't need them.
    from transformers import AutoConfig

    # This raises if the model type is missing or unknown to transformers.
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    if kind not in FAMILIES:
        raise CheckpointError(f"{name} is a {kind!r} checkpoint; this engine serves {', '.join(FAMILIES)}")
    defaults = type(config)().to_dict()
    known = USED | IRRELEVANT | PreTrainedConfig().to_dict().keys()
    for key in sorted(values.keys() & defaults.keys() - known):
        if values[key] not in (None, False, defaults[key]):
            raise CheckpointError(f"{name}: {key} is {show(values[key])}, an option of {kind} this engine doesn't know")
    return config


# This module has no postponed annotations, because `strict` checks each value against its field's type.
@strict
class LlamaConfig(PreTrainedConfig):
    """The fields of transformers' LlamaConfig, with its defaults and its validation of the heads.

    initializer_range is not validated, as only training uses it.
    """

    model_type = "llama"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False
    head_dim: int | None = None

    def __post_init__(self, **kwargs: object) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # transformers doesn't annotate it

    def validate_architecture(self) -> None:
        """Raise if the number of heads doesn't divide the hidden size, with transformers' message."""
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"The hidden size ({self.hidden_size}) is not a multiple of the number of attention "
                f"heads ({self.num_attention_heads})."
            )
