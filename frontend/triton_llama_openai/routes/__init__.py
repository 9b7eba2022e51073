"""A module for each path of the API or a few."""
