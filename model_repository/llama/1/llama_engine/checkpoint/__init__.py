"""From a checkpoint's files to weights: hub, files, config, tensors, formats."""
