"""The founding article's table, measured: its three servers and ours, under its load and under mixed lengths."""
