"""What knows Triton besides model.py: config, queue policy, logger, metrics."""
