"""The article's measurement: configurations of our server under perf_analyzer's closed loop."""
