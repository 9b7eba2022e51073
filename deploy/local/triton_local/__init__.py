"""Triton without Docker: start the `tritonserver` of the nvidia-pytriton wheel on a model repository.

`python -m triton_local` is the command line, `triton_local.server.LocalTriton` the context manager.
Nothing here imports the model.
"""
