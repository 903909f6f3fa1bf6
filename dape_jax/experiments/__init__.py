"""The paper's experiments by name. Read in that order: catalogue (what they are), run (how they are run), report.

python -m dape_jax.experiments list
python -m dape_jax.experiments show fig2 --preset=small
python -m dape_jax.experiments run fig2 --preset=small
python -m dape_jax.experiments run table6 --preset=small --tasks=even_pairs
python -m dape_jax.experiments report
"""
