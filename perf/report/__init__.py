"""The tables and the plot of docs/benchmarks.md from perf/results/*.json."""
