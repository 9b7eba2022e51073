"""Metrics, stats, request log, health."""
