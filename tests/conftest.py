"""Strict JAX for every test: eight simulated devices, no silent promotion of ranks, annotations checked at run time."""

import os
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "Agg"
# The suite's time is compilation, and LLVM's optimisation doubles it. The command lines' tests run with it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

# Many tests run the same small program: each is compiled once in a session.
CACHE = tempfile.TemporaryDirectory(prefix="dape_jax_tests_")
jax.config.update("jax_compilation_cache_dir", CACHE.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)

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
