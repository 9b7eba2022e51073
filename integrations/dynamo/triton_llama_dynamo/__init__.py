"""Triton with this project's model repository as a worker of NVIDIA Dynamo: token ids in, token ids out."""

LOST = 911 & 0xFF
"""Exit code of a worker whose Triton was lost. Dynamo exits with 911, of which the system keeps a byte, when requests
don't end within its DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT."""
