"""Adapters to Triton, used by model.py only: config, queue policy, requests, responses, metrics."""
