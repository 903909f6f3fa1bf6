"""Strict JAX for all tests: eight simulated devices, no implicit rank promotion, annotations checked at run time."""

import contextlib
import fcntl
import gc
import importlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "Agg"
# Most of the suite's time is compilation: LLVM's optimisation doubles it, XLA's newer emitter of fused loops triples
# it, and splitting small programs makes it a tenth longer. Command lines started by tests inherit these flags.
FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # later releases have only the newer emitter, and abort
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
gc.set_threshold(100_000, 20, 20)  # tracing makes many objects: by default a tenth of the time is collections
# One compilation cache for all workers, command lines and later runs: its key covers program, options and versions.
CACHE = Path(__file__).parents[1] / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # most programs are small

import jax  # noqa: E402
import pytest  # noqa: E402

from dape_jax.errors import InputError  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test that is slow by its parameters as exhaustive: it is close to the fast ones."""
    for item in items:
        of_function = [mark.name for mark in getattr(item.function, "pytestmark", [])]  # type: ignore[attr-defined]
        of_module = any(node is not item for node, _ in item.iter_markers_with_node("slow"))
        if item.get_closest_marker("slow") and "slow" not in of_function and not of_module:
            item.add_marker(pytest.mark.exhaustive)


def init_in_one_line(error: InputError, *messages: str, init: Any = InputError.__init__) -> None:
    """Check in all tests that no message of an `InputError` has a line break."""
    assert "\n" not in "".join(messages), messages
    init(error, *messages)


InputError.__init__ = init_in_one_line  # type: ignore[method-assign]

MAPS = Path("/proc/self/maps")
last_look = time.monotonic()


@pytest.fixture(autouse=True)
def few_memory_mappings():
    """Drop compiled programs before the process reaches Linux' limit of 65,530 memory mappings, where it crashes.

    One test of an interpreted kernel adds up to 6,500, small tests about 3,000 in 10 seconds: a check after a test, at
    most every 10 seconds, is enough and cheap.
    """
    global last_look
    yield
    if time.monotonic() - last_look > 10 and MAPS.exists():
        if MAPS.read_text().count("\n") > 20_000:
            jax.clear_caches()
            gc.unfreeze()
            gc.collect()
        last_look = time.monotonic()
    gc.freeze()  # the remaining objects are mostly programs: collections need not traverse them repeatedly


@pytest.fixture(autouse=True)
def no_programs_of_slow_tests_in_the_cache(request: pytest.FixtureRequest):
    """Keep out programs with thousands of kernels: loading one overflows the stack of XLA's thread (jaxlib 0.10.2)."""
    option = "jax_persistent_cache_min_compile_time_secs"
    if request.node.get_closest_marker("slow"):
        jax.config.update(option, 1e9)
    yield
    jax.config.update(option, 0)


@pytest.fixture
def float64():
    """Enable double precision in one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def smooth_leaky_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smooth the kink of DAPE's LeakyReLU: rounding may move a feature across it and change a gradient."""
    import jax.numpy as jnp

    from dape_jax.model import processors

    def smooth(x: jax.Array) -> jax.Array:
        return (1 + processors.SLOPE) / 2 * x + (1 - processors.SLOPE) / 2 * jnp.sqrt(x * x + 1)

    def change(x: jax.Array, knee: jax.Array) -> jax.Array:
        center = knee / (1 - processors.SLOPE)
        return smooth(x + center) - smooth(center)

    monkeypatch.setattr(jax.nn, "leaky_relu", lambda x, _: smooth(x))
    monkeypatch.setattr(processors, "leaky_relu_change", change)


@pytest.fixture(scope="session")
def trained_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the runs of `tiny.SPEC` once and return their root, which all xdist workers share.

    Contains text/, cache/, runs/none (no processor) and runs/dape, each with checkpoints at steps 2 and 4.
    Read-only: other workers use it at the same time. `trained_runs` returns copies that a module may write to.
    """
    import tiny

    from dape_jax.training import loop

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    root /= "trained"
    root.mkdir(exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in ("none", "dape"):
            spec = tiny.spec(root, train__num_steps=4)
            if name == "none":
                spec["model"]["processor"] = {"name": "none"}
            loop.train(spec, root / "runs" / name)  # returns at once if another worker has trained it
    return root


@pytest.fixture(scope="module")
def trained_runs(trained_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return this module's own copies of the trained runs, named none and dape, in one directory."""
    runs = tmp_path_factory.mktemp("trained") / "runs"
    shutil.copytree(trained_root / "runs", runs)
    return [runs / "none", runs / "dape"]


@pytest.fixture(scope="module")
def trained_run(trained_runs: list[Path]) -> Path:
    """Return this module's own copy of the trained run with kerple and DAPE 1x3."""
    return trained_runs[1]


@pytest.fixture
def libtpu(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the compiler for TPUs, which aborts on the CPU's flags above."""
    monkeypatch.delenv("XLA_FLAGS")
    from dape_jax.planning.compile import find_libtpu

    try:
        return find_libtpu()
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def google_storage() -> Iterator[None]:
    """Serve gs://bucket/ from this machine's memory."""
    server_of = pytest.importorskip("gcp_storage_emulator.server").create_server
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)  # logs every request
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = server_of("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    url = f"http://127.0.0.1:{port}"
    environment = {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url}
    environment["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # would ask Google for the kind of the bucket
    objects = importlib.import_module("gcp_storage_emulator.handlers.objects")
    download = objects.download

    def with_generation(request: Any, response: Any, storage: Any, *args: Any) -> None:
        """Add a header that the server lacks and TensorStore needs."""
        with contextlib.suppress(objects.NotFound):
            found = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
            response["X-Goog-Generation"] = found["generation"]
        download(request, response, storage, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "download", with_generation)
        for name, value in environment.items():
            patch.setenv(name, value)
        yield
    server.stop()
