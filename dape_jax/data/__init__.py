"""Files -> documents -> tokens on disk -> Grain batches.

Read in that order: corpus, records (and megatron), tokenizers, build, store, batches; `prepare` is a command line to
`build`.
"""
