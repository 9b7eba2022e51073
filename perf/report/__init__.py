"""Tables and plots from perf/results/*.json. Runs without torch and without a server."""
