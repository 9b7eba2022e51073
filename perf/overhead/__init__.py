"""Where the time of serving goes: server, bare engine and bare forward on one load, and each one's parts."""
