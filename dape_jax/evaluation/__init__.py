"""From a checkpoint to a comparison by length. Read in that order: perplexity, evaluate, report."""
