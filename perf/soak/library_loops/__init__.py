"""A loop for each library, which its own environment runs; nothing here needs another package."""
