"""The network: a LlamaForCausalLM small enough to train on two cores and shaped like its big relatives."""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TRAINED_CONTEXT = 512
CONTEXT = 2048
# Llama 3's scaling of RoPE: frequencies that turn four times or more within the trained context stay, those that turn
# less than once are divided by the factor. Chosen by held-out perplexity (docs/decisions.md).
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": CONTEXT / TRAINED_CONTEXT,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED_CONTEXT,
}
HIDDEN = 256
LAYERS = 6


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a model with random weights (drawn from torch's global stream) for this tokenizer, in float32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TRAINED_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            # The residual stream starts near the identity, whatever the depth.
            layer.self_attn.o_proj.weight.mul_((2 * LAYERS) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * LAYERS) ** -0.5)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        repetition_penalty=1.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def extend_context(config: LlamaConfig) -> None:
    """Set the context of a trained model to CONTEXT tokens, without further training: the positions are scaled."""
    config.max_position_embeddings = CONTEXT
    config.rope_parameters = dict(ROPE)
