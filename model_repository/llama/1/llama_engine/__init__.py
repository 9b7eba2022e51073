"""Batched Llama decoding on a slot cache: everything the Triton model does that is not Triton.

The way of a request through the modules:

    requests    raw inputs → GenerationRequest, or an InvalidRequest that names input, value and bound
      text        prompt → tokens
      defaults    what a request gets that leaves an input out
    engine      prefill → slot → decode steps → Completion
      cache       one slot per row, allocated once
      sampler     each slot's parameters and history; sampling: the formulas; philox: one random stream per row
      banning     bad words, however they would be split into tokens
      stopping    end tokens, stop words, length
      vocabulary  tokens as bytes
    checkpoint  the model, in the precision that the settings ask for; checkpoint_files: are its files whole
      memory      the plan of what is held where, refused before it fails
    readiness   whether a request that came now would be decoded; vitals: what the thread that steps notes of it
    host_log, host_metrics: log lines and metrics, in the program that the engine runs in
    settings    what the model is told from outside; model_config: what Triton says of the model
    errors      what can go wrong, as types

Nothing in here imports Triton; `model.py` next to this package is the only file that does.
"""
