"""Measurements of speed and memory; results are in `results/`."""
