"""An endpoint that speaks OpenAI's protocol in front of Triton: chat, responses, completions, models, tokens.

    HTTP request → schemas → chat template, guide → engine's inputs → one gRPC stream → deltas → answer or events

A process of its own that may run anywhere: it talks to Triton over gRPC, which describes the model, too.
`docs/openai.md` lists every field.
"""
