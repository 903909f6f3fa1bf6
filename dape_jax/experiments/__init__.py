"""The paper's experiments by name. Read in this order: catalogue (data), run (train and evaluate), report (judge).

python -m dape_jax.experiments list
python -m dape_jax.experiments show fig2 --preset=small
python -m dape_jax.experiments run fig2 --preset=small
python -m dape_jax.experiments run table6 --preset=small --tasks=even_pairs
python -m dape_jax.experiments report
"""
