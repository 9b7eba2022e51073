"""Triton without Docker: start the `tritonserver` of the nvidia-pytriton wheel on a model repository.

`python -m triton_local` is the command line; `triton_local.server.LocalTriton` is the same thing as a context manager.
Nothing here knows what the model does, and nothing here imports it.
"""
