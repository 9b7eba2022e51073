"""The roofline: a device's measured rates, and the least time that a load can take on it."""
