"""perf_analyzer, Triton's own load generator: where it is, what it is told, and what it says."""
