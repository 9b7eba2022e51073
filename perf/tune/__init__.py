"""Which batching settings of a config answer most under a bound on latency: measured on this machine, this load.

`make tune SLO_P95_MS=…` measures settings around those of a config, each on a server of its own, and prints the config
it recommends, ready to be saved, with the points it was chosen among.
"""
