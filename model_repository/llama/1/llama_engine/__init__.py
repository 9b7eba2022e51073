"""The inference engine: continuous batching of Llama decoding over a slot KV cache.

Independent of Triton except for `triton/`; `model.py` beside this package is the Python backend's entry point.

settings, errors   configuration and exceptions
libraries          torch and transformers, imported with short OpenMP spinning
sequence           one request in the engine
events             the engine's output: chunks and results
scheduler          the waiting queue, admission, cancellation, deadlines, shutdown
engine             the step: prefill, decode, append, remove
prefill            the prompts of a step
slot_batch         the sequences that decode: all state per row
decode_step        the forward pass and the sampling of a step
cuda_graphs        captured decode steps, replayed
isolation          retrying a failed batch in halves
response_dispatcher  the thread that sends responses
api/               requests: parsing, bounds, the checkpoint's defaults
text/              tokenizer, stop strings, bad words
model/             checkpoint loading, the Llama forward pass, KV cache, memory plan
kernels/           8-bit matrix product, attention and fused elementwise operations, with their references
sampling/          logits processors, sampler, guides, log probabilities, random numbers
observability/     metrics, stats, log, health, readiness
triton/            adapters to Triton: config, requests and responses, metrics
"""
