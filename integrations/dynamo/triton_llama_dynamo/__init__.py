"""Triton with this project's model repository as a worker of NVIDIA Dynamo: token ids in, token ids out."""
