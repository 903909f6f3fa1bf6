"""Ahead-of-time planning: memory, FLOPs and collectives of a run on hardware that is not available."""
