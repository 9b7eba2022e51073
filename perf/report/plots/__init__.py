"""The plots, one a module: each takes a run and returns an SVG, or None where the run didn't measure what it shows."""
