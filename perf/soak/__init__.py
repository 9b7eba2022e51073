"""A server under mixed load for as long as one likes, and whether anything of it grows, leaks, changes or is lost."""
