"""Experiments of the paper by name. Reading order: catalogue (data), run (train and evaluate), report (verdicts).

python -m dape_jax.experiments list
python -m dape_jax.experiments show fig2 --preset=small
python -m dape_jax.experiments run fig2 --preset=small
python -m dape_jax.experiments run table6 --preset=small --tasks=even_pairs
python -m dape_jax.experiments report
"""
