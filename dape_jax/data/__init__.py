"""Files -> documents -> tokens on disk -> Grain batches.

Reading order: corpus, prepare.records (and prepare.megatron), tokenizers, prepare.build, store, batches;
`prepare.command` is the command line of `prepare.build`.
"""
