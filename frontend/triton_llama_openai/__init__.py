"""An endpoint that speaks OpenAI's protocol in front of Triton: chat, responses, completions, models, tokens.

A process of its own that may run anywhere: it talks to Triton over gRPC, which describes the model, too.
`docs/architecture.md` shows a request's way through the files, `docs/openai.md` lists every field.
"""
