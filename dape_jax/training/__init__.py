"""From batches to a trained model. Read in this order: optimizer, step, checkpoint, source, metrics, loop."""
