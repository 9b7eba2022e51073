"""Batched Llama decoding on a slot cache: everything the Triton model does that is not Triton.

The way of a request through the modules:

    requests    raw inputs → GenerationRequest, or an InvalidRequest that names input, value and bound
    text        prompt → tokens; tokens → bytes
    engine      prefill → slot → decode steps → Completion
      cache       one slot per row, allocated once
      sampling    penalties, temperature, top-k, top-p, one random stream per row
      stopping    end tokens, stop words, length
    weights     the checkpoint, in the precision the settings ask for
    memory      the plan of what is held where, refused before it fails

Nothing in here imports Triton; `model.py` next to this package is the only file that does.
"""
