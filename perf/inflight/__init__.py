"""`make bench-inflight`: in-flight batching against batches, the cost of a step, the prefill bound."""
