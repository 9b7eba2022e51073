"""A Llama's decoder layers on a CPU in C++: exact INT8 products and attention over each token's own positions.

`build` compiles one shared object per instruction set, `library` chooses and verifies one, `forward` runs a model with
it. `reference` specifies the results in torch.
"""
