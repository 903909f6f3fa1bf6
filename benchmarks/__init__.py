"""Measurements of speed and memory; results lie in `results/`."""
