"""Parts of `dape_jax.kernels.cuda` for `cuda_dape.py`. An exported model has a file of this name with their text."""

from dape_jax.kernels.cuda.compiler import SOURCES
from dape_jax.kernels.cuda.nvrtc import cached_code, nvrtc, shared_bytes
from dape_jax.kernels.cuda.tiling import Tiling, multiple, tilings

__all__ = ["SOURCES", "Tiling", "cached_code", "multiple", "nvrtc", "shared_bytes", "tilings"]
