"""Test the GPU kernels alone: uninitialised memory, meshes, lowering for CUDA, choices; cuDNN's attention.

`test_kernels.py` compares values and gradients with those of other implementations. cuDNN's attention is replaced by
XLA's implementation of the same function where values are computed. The kernels in CUDA run in an emulator.
"""

import ctypes
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import attend_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from processes import ROOT
from test_kernels import HAS_COMPILER, Case, assert_close, compiled

from benchmarks import cuda_compiled
from dape_jax.kernels import attend_fused, cuda, gpu, why_not_fused
from dape_jax.kernels.cuda import compiler, emulator, nvrtc, tiling
from dape_jax.model.attention import Auto, Blockwise, Dense, Fused
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import DapeConfig, ScoreMod
from dape_jax.model.scores import BLOCK_BYTES, Mask, causal_runs, rows_in_block

pytestmark = pytest.mark.extra

FUSED = functools.partial(attend_fused, platform="gpu", interpret=True)


def normal(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    return [draw.standard_normal(shape, np.float32) for shape in shapes]


def test_every_value_is_written_and_unseen_ones_are_not_read():
    """Check with NaN in uninitialised outputs; rows have keys after them and before the window."""
    t = gpu.Tiling(jnp.dtype("float32"), heads=2, channels=5, width=3, pad=1, reach=7, row_stride=1, interpret=True)
    rows, keys, taps = 16, 140, t.taps_per_dot * t.padded_heads
    shapes = [(2, rows, 2, 4), (2, keys, 2, 4), *[(taps, 16)] * 2, *[(keys + 1, 16)] * 2, (1, rows, 16), (2, rows, 16)]
    *operands, d_out = normal(*shapes, (2, 2, rows, keys))
    starts = jnp.array([2, 0], jnp.int32)
    distance = 2 + np.arange(rows)[:, None] - np.arange(keys)
    seen = (distance >= 0) & (distance < t.reach)

    @jax.jit
    def run(operands, d_out):
        out, pull = jax.vjp(lambda *operands: gpu.process(t, starts, *operands), *operands)
        return out, pull(d_out)

    out, grads = jax.device_get(run(operands, d_out))
    assert out.shape == d_out.shape
    assert (out[:, :, ~seen] < -1e38).all()
    assert np.isfinite(out).all()
    assert (np.abs(out[:, :, seen]) < 100).all()

    _, poisoned = jax.device_get(run(operands, np.where(seen, d_out, np.float32(np.nan))))
    jax.tree.map(np.testing.assert_array_equal, grads, poisoned)
    assert all(np.isfinite(grad).all() and np.abs(grad).max() > 1e-3 for grad in grads)
    np.testing.assert_array_equal(grads[1][:, 2 + rows :], 0)


H200 = AbstractDevice("NVIDIA H200", None, "gpu")


def data_parallel(attention, dtype, mesh):
    """Return the gradients of a layer, with sequences sharded and parameters replicated, and their arguments.

    The axes along which values vary are checked.
    """
    case = Case(width=2, alignment="causal", heads=2, groups=2, batch=2, length=12)
    graphdef, params = nnx.split(case.layer(dtype))

    def loss(params, q, k, v):
        pos = jnp.arange(q.shape[1])
        out = attend_rows(attention, q, k, v, pos, pos, ScoreMod(*nnx.merge(graphdef, params)))
        return jax.lax.psum((out.astype(jnp.float32) ** 2).sum(), "data")

    share, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    loss = jax.shard_map(loss, mesh=mesh, in_specs=(whole, share, share, share), out_specs=whole)
    return jax.jit(jax.grad(loss, (0, 1, 2, 3))), (nnx.to_pure_dict(params), *case.arrays(dtype)[:3])


def lower_for_cuda(attention, *targets: str, dtype=jnp.float32, num_devices: int = 2) -> str:
    """Return the lowered program of `data_parallel` as text; `targets` are the custom calls of the implementation."""
    mesh = AbstractMesh((num_devices,), ("data",), (AxisType.Auto,), abstract_device=H200)
    step, arguments = data_parallel(attention, dtype, mesh)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
        return jax.export.export(step, platforms=["cuda"], disabled_checks=checks)(*arguments).mlir_module()


# JAX 0.11 announces the removal of the Triton backend of Pallas.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_lowers_to_triton():
    """Lower also rematerialised layers in a scan; the next steps need a GPU's compiler."""

    def layers(q, *args):
        @jax.checkpoint
        def layer(q, _):
            return attend_fused(q, *args, platform="gpu"), None

        return jax.lax.scan(layer, q, length=2)[0]

    kernels = set(re.findall(r"dape_\w+_kernel", lower_for_cuda(layers, "__gpu$xla.gpu.triton")))
    assert kernels == {"dape_forward_kernel", "dape_scores_gradient_kernel", "dape_parameters_gradient_kernel"}


# ---- kernels in CUDA

CUDA = functools.partial(attend_fused, platform="cuda", interpret=True)
TILES = dict(tiling.TILES)


def emulated(case: Case, patch: pytest.MonkeyPatch, tile: int, dtype=jnp.float32):
    """Return a function of a seed and of a factor of the output's gradient to values and all gradients.

    The tiles are those from `tile` on.
    """
    for name, tiles in TILES.items():
        patch.setitem(tiling.TILES, name, tiles[min(tile, len(tiles) - 1) :])
    patch.setattr(tiling, "LEAST_TILES", {"forward": 1, "backward": 2})
    both, params = case.run(CUDA)
    q, k, v, dout = case.arrays(dtype)

    def run(seed: int = 0, scale: float = 1.0):
        patch.setattr(emulator, "SEED", seed)
        return jax.device_get(both(params, q, k, v, dout * dtype(scale), *case.positions()))

    return run


@HAS_COMPILER
@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_sizes_tiles_and_orders_of_warps(data):
    """The bits do not depend on the order in which warps run between barriers."""
    num_heads, length = data.draw(st.sampled_from([1, 6, 12, 18])), data.draw(st.integers(1, 150))
    width, alignment = data.draw(st.sampled_from([(1, "centered"), (3, "centered"), (7, "centered"), (2, "causal")]))
    case = Case(
        data.draw(st.sampled_from(["nope", "kerple", "t5"])),
        width,
        alignment,
        channels=data.draw(st.sampled_from([3, 16, 48])),
        heads=num_heads,
        groups=data.draw(st.sampled_from([n for n in (1, 2, num_heads) if num_heads % n == 0])),
        head_dim=data.draw(st.sampled_from([8, 24, 32])),
        length=length,
        row_stride=data.draw(st.integers(1, 3)),
        first=data.draw(st.integers(0, length - 1)),
        window=data.draw(st.none() | st.integers(1, length)),
    )
    tile = data.draw(st.integers(0, 3))
    with pytest.MonkeyPatch.context() as patch:
        ours, again = map(emulated(case, patch, tile), (0, 7))
    dense = compiled(case, "dense")(*case.arrays(), *case.positions())
    assert_close(ours, jax.device_get(dense), 1e-5)
    jax.tree.map(np.testing.assert_array_equal, ours, again)


@HAS_COMPILER
def test_gradients_are_as_precise_for_any_size_of_the_loss(monkeypatch):
    """Inside, gradients are float16 times a power of two: a loss times 2^n gives the same bits times 2^n."""
    case = Case(heads=2, groups=1, length=50, channels=16)
    run = emulated(case, monkeypatch, 2, jnp.bfloat16)
    (out, small), (_, large) = (run(scale=x) for x in (2.0**-40, 2.0**40))
    assert out.dtype == jnp.bfloat16
    for x, y in zip(jax.tree.leaves(small), jax.tree.leaves(large), strict=True):
        np.testing.assert_array_equal(np.float64(x) * 2.0**80, np.float64(y))
        assert np.isfinite(np.float64(y)).all()


@HAS_COMPILER
def test_gradients_in_a_users_shard_map():
    """JAX does not know by itself that the results of a kernel differ between devices."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    ours, dense = (step(*args) for step, args in (data_parallel(each, jnp.float32, mesh) for each in (CUDA, Dense())))
    assert_close(ours, jax.device_get(dense), 1e-5)


@HAS_COMPILER
def test_references_are_renewed():
    """Scores grow towards the first key by far more than the reference allows."""
    case = Case(heads=2, groups=1, length=150, channels=16)
    q, k, v, dout = case.arrays()
    arrays = np.abs(q), np.abs(k) * np.linspace(60, 0, 150, dtype=np.float32)[:, None, None], v, dout
    runs = map(case.run, (CUDA, Dense()))
    found, dense = (jax.device_get(both(params, *arrays, *case.positions())) for both, params in runs)
    assert_close(found[0], dense[0], 1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(found[1]), jax.tree.leaves(dense[1]), strict=True):
        close = {"rtol": 0, "atol": 1e-4 * max(1, np.abs(y).max())}
        np.testing.assert_allclose(x, y, **close, err_msg=jax.tree_util.keystr(path))


def test_what_the_kernels_in_cuda_take(monkeypatch):
    def ask(capability="9.0", dtype=jnp.bfloat16, **sizes):
        device = SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda: [device])
        case = Case(**sizes)
        q, k = (jax.ShapeDtypeStruct(x.shape, dtype) for x in case.arrays()[:2])
        return why_not_fused(q, k, ScoreMod(*case.abstract_layer()), Mask(row_stride=case.row_stride), platform="cuda")

    large = {"head_dim": 64, "channels": 32, "heads": 12, "groups": 12}
    assert ask(**large) is ask(dtype=jnp.float16, **large) is ask(plain=True) is ask("12.0", **large) is None
    assert "registers" in str(ask(heads=32, groups=32, head_dim=128, channels=32))
    assert "232448" in str(ask(heads=64, groups=64, channels=64))
    assert "101376" in str(ask("8.6", **large | {"width": 7}))
    monkeypatch.setattr(cuda, "device_platform", lambda: "gpu")
    assert "float32" in str(ask(dtype=jnp.float32))
    for capability in ("7.5", "gfx942"):
        assert capability in str(ask(capability))
    monkeypatch.setattr(compiler, "nvrtc", lambda: 1 / 0)
    monkeypatch.setattr(compiler, "_launcher", lambda: None)
    with pytest.raises(ZeroDivisionError):  # the compiler is looked for last
        ask()


@pytest.mark.parametrize("plain", [False, True])
def test_arrays_have_the_dtypes_that_the_kernels_read(plain):
    """With `jax_enable_x64` too; the emulator's launcher checks them."""
    case = Case(plain=plain)
    both, params = case.run(CUDA)
    with jax.enable_x64(True):
        out, _ = jax.eval_shape(both, params, *case.arrays(), *case.positions())
    assert out.dtype == jnp.float32


def test_the_oldest_compiler_is_loaded_after_its_library(monkeypatch, tmp_path):
    """NVRTC 13.0 finds the library only if it is loaded; ptxas of CUDA 12 does not take the PTX of 13."""
    names = ["cuda_nvrtc/lib/libnvrtc-builtins.so.12.9", "cuda_nvrtc/lib/libnvrtc.so.12"]
    for name in (*names, "cu13/lib/libnvrtc-builtins.so.13.0", "cu13/lib/libnvrtc.so.13"):
        (tmp_path / "nvidia" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvidia" / name).touch()
    loaded: list[str] = []

    class Library(ctypes.CDLL):
        def __init__(self, name):
            loaded.append(name)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", Library)
    nvrtc.nvrtc.__wrapped__()
    assert loaded == [str(tmp_path / "nvidia" / name) for name in names]


@pytest.fixture
def cuda_aot() -> dict[str, str]:
    """Return an environment in which Python finds NVIDIA's compiler and JAX's plugin for CUDA."""
    folder = Path(sys.prefix, "cuda-aot")
    if not folder.exists():
        pytest.skip("make cuda-aot")
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", folder)))}


LOWER = """
import functools, jax, test_gpu_kernel as t
from dape_jax.kernels.cuda import compiler
compiler.check()
attention = functools.partial(t.attend_fused, platform="cuda")
text = t.lower_for_cuda(attention, compiler.TARGET, dtype=jax.numpy.bfloat16)
print(text.count(f"custom_call @{compiler.TARGET}"))
"""


@pytest.mark.slow
def test_kernels_in_cuda_lower_for_an_absent_gpu(cuda_aot, tmp_path):
    """PTX is compiled once, and kept in the user's cache."""
    files: list[set] = []
    for _ in range(2):
        command, environment = [sys.executable, "-c", LOWER], cuda_aot | {"XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.split()[-1] == "2"
        files.append({(path, path.stat().st_mtime_ns) for path in tmp_path.glob("dape_jax/*.ptx")})
    assert files[0] == files[1]
    assert len(files[0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "cases"),
    [
        ("sm_90a", [(12, 64, 32, 3), (20, 64, 32, 3), (32, 128, 32, 3), (12, 64, 0, 1)]),
        *(pytest.param(x, cuda_compiled.CASES, marks=pytest.mark.exhaustive) for x in cuda_compiled.ARCHITECTURES),
    ],
    ids=lambda x: x if isinstance(x, str) else len(x),
)
def test_kernels_in_cuda_compile(cuda_aot, tmp_path, architecture, cases):
    """Compare with the committed table: spilling more makes a kernel slow. The compiler checks the shared memory."""
    table = ROOT / "results" / "cuda_compiled" / "cuda_compiled.json"
    settings = f"c.Settings(('{architecture}',), '{tmp_path}')"
    code = f"from benchmarks import cuda_compiled as c; c.CASES = {cases}; c.main({settings})"
    subprocess.run([sys.executable, "-c", code], env=cuda_aot, capture_output=True, text=True, check=True)
    expected, found = (json.loads(file.read_text())["rows"] for file in (table, tmp_path / table.name))
    sizes = ("heads", "head_dim", "channels", "width")
    expected = [row for row in expected if row["architecture"] == architecture]
    expected = [row for row in expected if tuple(row[name] for name in sizes) in cases]
    assert len(expected) == len(found) > len(cases)
    for old, new in zip(expected, found, strict=True):
        assert old.keys() == new.keys()
        if "reason" not in old:
            assert all(old[field] == new[field] for field in ("kernel", "tile", "shared_kib"))
            assert new["spilled_loads"] <= 1.3 * old["spilled_loads"] + 100
            assert new["clocks"] <= 1.15 * old["clocks"]


# ---- rows of a block


def test_blockwise_takes_as_many_rows_as_memory_allows():
    for features, length, rows in ((12, 200, 256), (12, 2048, 512), (96, 2048, 256), (12, 131_072, 128)):
        assert rows_in_block(features, length, length, 4) == rows
        assert rows == 128 or 4 * features * rows * length <= BLOCK_BYTES
        assert len(causal_runs(length, length, rows, 4, Mask())) == min(4, -(-length // rows))
    config = DapeConfig(9, channels=32)  # wider than the kernels support
    processor = nnx.eval_shape(lambda: config.build(12, has_bias=False, rngs=nnx.Rngs(0)))
    for batch, auto, rows in ((8, Auto(), 128), (1, Auto(), 512), (1, Auto(64), 64)):
        q = jax.ShapeDtypeStruct((batch, 2048, 12, 64), jnp.bfloat16)
        assert auto.choose(q, q, ScoreMod(None, processor), platform="gpu") == Blockwise(rows, 4)


# ---- cuDNN


@pytest.mark.parametrize(("kv_heads", "window", "length"), [(4, None, 40), (2, 7, 37)])
def test_plain_attention_is_as_accurate_as_dense(kv_heads, window, length):
    """Compare values and gradients."""
    q, k, v, weight = normal((2, length, 4, 16), *[(2, length, kv_heads, 16)] * 2, (2, length, 4, 16))
    pos = jnp.arange(length)

    @functools.partial(jax.jit, static_argnums=0)
    def step(attention, q, k, v, pos):
        def loss(*args):
            out = attend_rows(attention, *args, pos, pos, mask=Mask(window=window)).astype(jnp.float32)
            return (out * weight).sum(), out

        grads, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, *grads

    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    exact = step(Dense(), *(x.astype(jnp.float32) for x in rounded), pos)
    ours, dense = step(FUSED, *rounded, pos), step(Dense(), *rounded, pos)
    for x, y, z in zip(ours, dense, exact, strict=True):
        error, allowed = (float(jnp.linalg.norm(a.astype(jnp.float32) - z)) for a in (x, y))
        assert 0 < error < 1.5 * allowed


@pytest.mark.parametrize("num_devices", [1, 2])
def test_plain_attention_lowers_to_cudnn(num_devices, monkeypatch):
    """Lower also without cuDNN."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91_000)

    def plain(q, k, v, positions, _, mask):
        return attend_fused(q, k, v, positions, mask=mask, platform="gpu")

    targets = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    text = lower_for_cuda(plain, *targets, dtype=jnp.bfloat16, num_devices=num_devices)
    assert set(re.findall(r"__cudnn\$\w+", text)) == set(targets)


def test_auto_chooses_cudnn_for_plain_attention_where_it_applies():
    def ask(shape=(2, 512, 12, 64), keys=512, dtype=jnp.bfloat16, bias="nope", **options):
        q = jax.ShapeDtypeStruct(shape, dtype)
        k = jax.ShapeDtypeStruct((shape[0], keys, *shape[2:]), dtype)
        built = nnx.eval_shape(lambda: BIASES[bias]().build(12, 64, nnx.Rngs(0)))
        args = q, k, ScoreMod(built), Mask(**options)
        implementation = Auto().choose(*args, platform="gpu")
        reason = why_not_fused(*args, platform="gpu")
        assert (implementation == Fused()) == (reason is None)
        return reason

    assert ask() is None
    assert ask(window=100) is None
    for options, word in (
        ({"bias": "kerple"}, "Kerple"),
        ({"dtype": jnp.float32}, "float32"),
        ({"shape": (2, 512, 12, 60)}, "multiples of 8"),
        ({"keys": 1024}, "not all rows"),
        ({"row_stride": 2}, "not all rows"),
        ({"causal": False}, "causal"),
    ):
        assert word in ask(**options)
