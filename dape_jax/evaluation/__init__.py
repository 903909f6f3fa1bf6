"""What a checkpoint is good for.

Read in that order: memory, perplexity, by_position, evaluate, report (a comparison by length); recall; generate;
attention_maps.
"""
