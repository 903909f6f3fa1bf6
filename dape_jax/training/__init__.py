"""Training: from batches to checkpoints. Reading order: optimizer, step, checkpoint, source, metrics, loop."""
