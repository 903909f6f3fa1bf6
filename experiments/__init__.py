"""Experiments of the paper by name. Reading order: catalogue (data), run (train and evaluate), report (verdicts)."""
