"""Triton's custom batching: a request whose texts are cut short is refused alone, not with its whole batch.

`build` compiles `batchstrategy.cpp`; Triton loads the library from the version folders of llama and llama_unary.
"""
