"""Fetches and runs NVIDIA's perf_analyzer, for the table `The article's setting` of docs/benchmarks.md."""
