"""`make resumption`: processes die under load, and every answer must be the one of the quiet run, byte for byte."""
