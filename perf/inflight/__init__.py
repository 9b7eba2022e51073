"""`make bench-inflight`: in-flight batching against batches, the prefill bound."""
