"""`make capacity`; see `__main__`."""
