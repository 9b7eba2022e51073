"""Metrics, stats, log, health, readiness."""
