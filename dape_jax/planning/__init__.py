"""Ahead-of-time planning: memory, FLOPs and collectives of a run, compiled for hardware that is not available."""
