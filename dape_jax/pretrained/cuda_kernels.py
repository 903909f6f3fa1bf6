"""Parts of `dape_jax.kernels.cuda` for `cuda_dape.py`. An exported model has a file of this name with their text."""

from dape_jax.kernels.cuda.compiler import SOURCES as SOURCES
from dape_jax.kernels.cuda.nvrtc import *  # noqa: F403
from dape_jax.kernels.cuda.tiling import *  # noqa: F403
