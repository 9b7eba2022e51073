"""Servers under test: the same interface starts ours and the baselines, and gives the load generator its `Target`.

"The article" is the comparison with which this project began (docs/benchmarks.md, "The article's setting").
"""
