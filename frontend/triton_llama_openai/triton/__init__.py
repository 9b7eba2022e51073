"""The way to Triton: clients, replicas, balancing, resumption, generations."""
