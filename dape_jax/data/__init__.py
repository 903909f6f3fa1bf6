"""Files -> documents -> tokens on disk -> Grain batches.

Training reads `store` and `batches`. Preparation comes before: `prepare.inputs`, `prepare.records` (and
`prepare.megatron`), `tokenizers`, `prepare.build`; `prepare.command` is its command line.
"""
