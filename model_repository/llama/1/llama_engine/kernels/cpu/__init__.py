"""A Llama's decoder layers on a CPU in C++: exact INT8 products, and attention computed separately for each token.

`build` compiles one shared object per instruction set, `instruction_sets` chooses the fastest that passes `self_test`,
`library` loads it, and `forward` runs a model with it. `cpu_reference` is the reference implementation in PyTorch.
"""
