"""Pretrained models: import of Hugging Face checkpoints as runs, and export of runs in their layout.

`files.py` reads tensors from a directory, `families.py` says which of them is which parameter, `load.py` makes a run of
them. `docs/pretrained.md` is the manual.
"""
