"""The loop: engine, scheduler, sequences, prefill, decode steps and the KV cache's pages."""
