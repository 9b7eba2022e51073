"""A Llama's decoder layers on a CPU in C++: exact INT8 products and attention over each token's own positions.

`build` compiles one shared object per instruction set, `trial` chooses and verifies one, `library` loads it, and
`forward` runs a model with it. `cpu_reference` specifies the results in torch.
"""
