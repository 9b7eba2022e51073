"""perf_analyzer, Triton's own load generator: its binary, and a run of it."""
