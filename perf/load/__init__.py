"""The load generator: the same requests, sent by the same rule and timed by the same clock, for every server.

    run = drive(Target("vllm", "openai_completions", "http://127.0.0.1:8000", "llama"), requests, 32, ...)
    summarize(run)

On a small machine it takes processor time from the server under test, the same for every server: 50 µs per streamed
event.
"""
