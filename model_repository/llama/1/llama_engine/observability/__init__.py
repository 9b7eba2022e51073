"""Metrics, stats, log, readiness."""
