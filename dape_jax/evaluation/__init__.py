"""Evaluate checkpoints. Read in this order: trained, memory, perplexity, by_position, evaluate, accuracy, report."""
