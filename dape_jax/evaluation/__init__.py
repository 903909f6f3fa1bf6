"""Evaluator of the paper: perplexity by length and by position, and accuracy on the algorithmic tasks.

Reading order: trained (load a model), programs; statistics, figures, styles; protocols; perplexity, accuracy;
report.
"""
