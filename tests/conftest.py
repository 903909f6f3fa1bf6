"""Strict JAX for every test: eight simulated devices, no silent promotion of ranks, annotations checked at run time."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "Agg"
# The suite's time is compilation, and LLVM's optimisation doubles it. The command lines' tests run with it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# One compilation cache for all workers, command lines and later runs: its key covers program, options and versions.
CACHE = Path(__file__).parents[1] / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def float64():
    """Double precision inside one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def libtpu() -> Path:
    """The compiler for TPUs."""
    from dape_jax.errors import InputError
    from dape_jax.hardware import find_libtpu

    try:
        return find_libtpu()
    except InputError as error:
        pytest.skip(str(error))
