"""NVIDIA's perf_analyzer, for the article's tables."""
