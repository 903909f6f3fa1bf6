"""What a checkpoint is good for.

Read in that order: perplexity, evaluate, report (a comparison by length); generate; attention_maps.
"""
