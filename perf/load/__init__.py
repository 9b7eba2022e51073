"""The load generator: the same requests, by the same rule and the same clock, for every server."""
