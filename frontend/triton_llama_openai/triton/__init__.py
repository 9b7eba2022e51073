"""The way to Triton: its client, a request's inputs, resumption, generations."""
