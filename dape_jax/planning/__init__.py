"""Ahead-of-time planning: memory and FLOPs of a run on hardware that is not available."""
