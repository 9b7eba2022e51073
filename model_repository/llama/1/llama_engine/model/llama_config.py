"""A Llama's configuration, read from config.json.

Replaces transformers' LlamaConfig, whose module imports TorchDynamo, torch.distributed and SymPy: 0.8 s of CPU time at
every start. Reading, conversion and validation are inherited from transformers' `PreTrainedConfig`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from llama_engine.errors import CheckpointError

if TYPE_CHECKING:
    import transformers


def read_config(folder: Path, name: str) -> "transformers.LlamaConfig":
    """Return the config of a supported Llama. Raises CheckpointError for other models. name: for error messages.

    The result has the fields of transformers' LlamaConfig, but is not an instance of it.
    """
    if not (folder / "config.json").exists():
        raise CheckpointError(f"can't load {name}: it has no config.json")
    values, _ = PreTrainedConfig.get_config_dict(folder)
    if values.get("model_type") != LlamaConfig.model_type:
        # Imported here because the Auto classes are slow to import and a Llama doesn't need them.
        from transformers import AutoConfig

        # Raises if the model type is missing or unknown to transformers.
        other = AutoConfig.from_pretrained(folder)
        raise CheckpointError(f"{name} is a {other.model_type!r} checkpoint; this engine serves 'llama'")
    config = LlamaConfig.from_pretrained(folder)
    if config.hidden_act != "silu":
        raise CheckpointError(f"{name}: hidden_act is {config.hidden_act!r}; this engine computes 'silu'")
    return cast("transformers.LlamaConfig", config)


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
