"""The batching settings with the highest throughput under a bound on p95 latency, for this machine and load."""
