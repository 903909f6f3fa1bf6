"""Files -> documents -> tokens on disk -> Grain batches. Read in that order: corpus, tokenizers, store, batches."""
