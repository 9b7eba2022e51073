"""The inference engine: continuous batching of Llama decoding over a KV cache of pages.

Independent of Triton except for `triton/`; `model.py` beside this package is the Python backend's entry point.

triton/            adapters to Triton: config, requests and responses, metrics
observability/     metrics, stats, log, readiness
engine/            the loop: scheduler, step, prefill, decode, sequences, pages
guides/            checker, compiler, translation to grammars, matcher
sampling/          sampler, filters, draw, bias and bad words, log probabilities
model/             how a checkpoint is served, the forward passes, the KV cache
kernels/           8-bit products, attention and fused elementwise operations, with their references
checkpoint/        files, config, formats, weights
request/           request parameters: the table, parsing, defaults
text/              tokenizer, output text with its stop conditions, partial matches
settings, errors   configuration and exceptions
libraries          torch and transformers, imported with short OpenMP spinning
"""
