"""What in-flight batching gains over batches that run to their end, and what it costs: three measurements, one run."""
