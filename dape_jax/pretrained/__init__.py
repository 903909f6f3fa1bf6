"""Pretrained models: import of Hugging Face checkpoints as runs, and export of runs as Hugging Face checkpoints.

`files.py` reads tensors from a directory, `families.py` maps them to parameters, `load.py` writes the run directory.
`docs/pretrained.md` is the manual.
"""
