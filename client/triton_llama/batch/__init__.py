"""Batches: OpenAI's files of requests, sent to an OpenAI endpoint; the command `triton-llama run-batch`."""
