"""Strict JAX for every test: eight simulated devices, no silent promotion of ranks, annotations checked at run time."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "Agg"

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def float64():
    """Double precision inside one test."""
    with jax.enable_x64(True):
        yield
