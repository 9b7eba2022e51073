"""What every benchmark shares: the checkpoint, the load, the machine, the budget and the form of a result."""
