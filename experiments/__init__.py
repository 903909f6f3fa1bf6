"""Experiments of the paper by name. Reading order: catalogue (data), run (train and evaluate), report (verdicts).

python -m experiments list
python -m experiments show fig2 --preset=small
python -m experiments run fig2 --preset=small
python -m experiments run table6 --preset=small --tasks=even_pairs
python -m experiments report
"""
