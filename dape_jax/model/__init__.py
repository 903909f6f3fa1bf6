"""Transformer model. Reading order: positions, scores, biases, contextual, processors, attention, transformer, loss."""
