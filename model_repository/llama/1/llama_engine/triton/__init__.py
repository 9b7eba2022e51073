"""What knows Triton besides model.py: config, queue policy, requests and responses, metrics."""
