"""The tables, one a module: each takes a run and returns what stands in the README or docs/benchmarks.md."""
