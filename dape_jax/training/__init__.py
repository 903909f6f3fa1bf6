"""From batches to a trained model. Read in that order: optimizer, step, checkpoint, loop."""
