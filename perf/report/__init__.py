"""Tables and plots out of perf/results/*.json. Measures nothing, and needs neither torch nor a server."""
