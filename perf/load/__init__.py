"""One load generator for every server: the same requests, sent in the same manner, timed by the same clock.

    run = drive(Target("vllm", "openai_completions", "http://127.0.0.1:8000", "llama"), requests, Closed(32), ...)
    summarize(run, SLO(0.5, 0.05))

The generator is locust, used as a library in a process of its own (`python -m perf.load`), because it patches Python's
sockets and threads. On a small machine it takes processor time from the server it measures; it is the same for all.
"""
