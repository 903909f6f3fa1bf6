"""Test the GPU kernels: interpreted, with small tiles so that there are several of everything, and lowered for CUDA.

cuDNN's attention is replaced by XLA's implementation of the same function where values are computed.
"""

import functools
import re
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

from dape_jax.kernels import attend_fused, gpu, why_not_fused
from dape_jax.model.attention import Auto, Blockwise, Dense, Fused
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import Dape, DapeConfig, ScoreMod
from dape_jax.model.scores import BLOCK_BYTES, Mask, causal_runs, rows_in_block

PROCESSORS = {
    "W1": DapeConfig(kernel_width=1, channels=5),
    "W3": DapeConfig(kernel_width=3, channels=5),
    "W5": DapeConfig(kernel_width=5, channels=20),
    "W7": DapeConfig(kernel_width=7, channels=5),
    "causal2": DapeConfig(kernel_width=2, channels=5, alignment="causal"),
    "causal4": DapeConfig(kernel_width=4, channels=5, alignment="causal"),
    "equation2": DapeConfig(kernel_width=3, channels=5, residual=False),
    "of_scores": DapeConfig(kernel_width=3, channels=5, inputs="scores"),
    "of_bias": DapeConfig(kernel_width=3, channels=5, inputs="bias"),
}
FUSED = functools.partial(attend_fused, platform="gpu", interpret=True)


@pytest.fixture
def small_tiles(monkeypatch):
    """Use blocks of 16 rows and bands of 16 offsets, so that a few dozen rows have several blocks, bands and runs.

    Taps are a loop if there are more than five.
    """
    monkeypatch.setattr(gpu, "rows_in_block", lambda *_: 16)
    monkeypatch.setattr(gpu, "BAND_WIDTH", 16)
    monkeypatch.setattr(gpu, "NUM_RUNS", 2)
    monkeypatch.setattr(gpu, "MAX_UNROLLED", 1500)


def make_layer(bias: str, processor: DapeConfig, heads: int, dtype=jnp.float32):
    """Return random parameters of a bias and a processor, and a function of them."""

    def build():
        rngs = nnx.Rngs(0)
        built = BIASES[bias]().build(heads, 4, rngs)
        has_bias = built is not None
        return nnx.Dict(bias=built, processor=processor.build(heads, has_bias=has_bias, dtype=dtype, rngs=rngs))

    # None is 0, which would hide errors in its terms; and nothing is compiled for them.
    graphdef, abstract = nnx.split(nnx.eval_shape(build), nnx.Param)
    draw = np.random.default_rng(0)

    def random(path, leaf):
        is_positive = path[-1].key in ("p_H", "a_H")
        return np.asarray(
            draw.uniform(0.2, 1, leaf.shape) if is_positive else draw.normal(0, 0.3, leaf.shape), leaf.dtype
        )

    params = jax.tree_util.tree_map_with_path(random, nnx.to_pure_dict(abstract))

    def run(attention, params, q, k, v, q_pos, k_pos, **options):
        layer = nnx.merge(graphdef, params)
        score_mod = ScoreMod(layer.bias, layer.processor)
        return attend_rows(attention, q, k, v, q_pos, k_pos, score_mod, Mask(**options))

    return params, run


def normal(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    return [draw.standard_normal(shape, np.float32) for shape in shapes]


def compare(
    bias: str,
    processor: DapeConfig,
    *,
    length: int,
    heads: int = 2,
    kv_heads=None,
    row_stride: int = 1,
    first: int = 0,
    window=None,
):
    """Compare values and all gradients with `Dense`, for every `row_stride`-th row from `first` on."""
    params, run = make_layer(bias, processor, heads)
    k_pos = jnp.arange(length)
    q_pos = k_pos[first::row_stride]
    shapes = [(2, len(q_pos), heads, 4), *[(2, length, kv_heads or heads, 4)] * 2, (2, len(q_pos), heads, 4)]
    q, k, v, weight = normal(*shapes)

    def step(attention):
        def loss(*args):
            out = run(attention, *args, q_pos, k_pos, window=window, row_stride=row_stride)
            return (out * weight).sum(), out

        grads, out = jax.device_get(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(params, q, k, v))
        grads[0]["processor"].pop("output_bias_H")  # 0 up to rounding
        return out, grads

    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=1e-4),
        step(FUSED),
        step(Dense()),
    )


def case(bias, processor, fast=False, **options):
    return pytest.param(bias, PROCESSORS[processor], options, marks=() if fast else pytest.mark.slow)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("bias", "processor", "options"),
    [
        case("kerple", "W3", fast=True, length=37, heads=3, kv_heads=1),
        case("t5", "causal2", length=30, window=9, kv_heads=1),
        case("alibi", "W1", length=50, heads=12),
        case("sandwich", "W3", length=70, heads=4, kv_heads=2),
        case("kerple", "W5", length=64, window=20, heads=20),
        case("t5", "W7", length=40, heads=12),
        case("nope", "causal4", length=35),
        case("kerple", "W3", length=64, row_stride=2, first=0),
        case("kerple", "W3", length=66, row_stride=2, first=1, window=21),
        case("alibi", "causal4", length=66, row_stride=3, first=2),
        case("kerple", "equation2", length=20),
        case("kerple", "of_scores", length=20),
        case("kerple", "of_bias", length=20),
    ],
)
def test_equal_to_dense(bias, processor, options):
    compare(bias, processor, **options)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_equal_to_dense_for_any_sizes(small_tiles, data):
    """Test any positions of the rows among the keys."""
    heads = data.draw(st.sampled_from([1, 2, 6, 17]))
    length, row_stride = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 3))
    compare(
        data.draw(st.sampled_from(["nope", "kerple", "t5"])),
        data.draw(st.sampled_from(list(PROCESSORS.values())[:6])),
        length=length,
        heads=heads,
        kv_heads=data.draw(st.sampled_from([n for n in (1, 2, heads) if heads % n == 0])),
        row_stride=row_stride,
        first=data.draw(st.integers(0, length - 1)),
        window=data.draw(st.none() | st.integers(1, length)),
    )


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


@pytest.mark.slow
def test_bfloat16_is_close_to_float32():
    """Errors of values and gradients are about those of `Dense` in bfloat16."""
    length, heads = 40, 4
    pos = jnp.arange(length)
    qkv = [x.astype(jnp.bfloat16) for x in normal(*[(1, length, heads, 16)] * 3)]

    def step(attention, dtype):
        params, run = make_layer("kerple", PROCESSORS["W3"], heads, dtype)

        def loss(*args):
            out = run(attention, *args, pos, pos).astype(jnp.float32)
            return (out**2).sum(), out

        args = (params, *(x.astype(dtype) for x in qkv))
        grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*args)
        grads[0]["processor"].pop("output_bias_H")  # 0 up to rounding
        return out, grads

    exact = step(Dense(), jnp.float32)

    def errors(some):
        return jax.tree.map(lambda x, y: np.linalg.norm(x.astype(jnp.float32) - y) / np.linalg.norm(y), some, exact)

    ours, theirs = errors(step(FUSED, jnp.bfloat16)), errors(step(Dense(), jnp.bfloat16))
    jax.tree.map(lambda a, b: np.testing.assert_array_less(a, 2 * b + 2**-9), ours, theirs)
    assert ours[0] > 1e-4, "the dtype made no difference"


def on_mesh(attention, mesh, dtype=jnp.float32, **options):
    """Return the gradients of a loss over sequences sharded and parameters replicated, and their arguments."""
    params, run = make_layer("kerple", PROCESSORS["causal2"], heads=2)
    pos = jnp.arange(12)
    qkv = [x.astype(dtype) for x in normal(*[(2, 12, 2, 8)] * 3)]

    def loss(*args):
        return jax.lax.psum((run(attention, *args, pos, pos).astype(jnp.float32) ** 2).sum(), "data")

    share, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    loss = jax.shard_map(loss, mesh=mesh, in_specs=(whole, share, share, share), out_specs=whole, **options)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))), (params, *qkv)


def test_on_a_mesh():
    """Sum gradients over devices; the interpreter does not support the check of varying axes."""
    two, one = (jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,)) for size in (2, 1))
    (step, args), (on_one, _) = on_mesh(FUSED, two, check_vma=False), on_mesh(Dense(), one, check_vma=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), step(*args), on_one(*args))


def lower_for_cuda(step, *args) -> set[str]:
    """Return the names of the kernels passed to Triton, and of cuDNN's."""
    calls = ("__gpu$xla.gpu.triton", "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    checks = [jax.export.DisabledSafetyCheck.custom_call(call) for call in calls]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        exported = jax.export.export(step, platforms=["cuda"], disabled_checks=checks)(*args)
    return set(re.findall(r"dape_\w+_kernel|cudnn\$\w+", exported.mlir_module()))


H200 = AbstractDevice("NVIDIA H200", None, "gpu")
# JAX 0.11 announces the removal of the Triton backend of Pallas.
OUTDATED = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
ALL_KERNELS = {"dape_forward_kernel", "dape_scores_gradient_kernel", "dape_parameters_gradient_kernel"}


@OUTDATED
@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        (jnp.bfloat16, 100),  # one block, padded
        pytest.param(jnp.bfloat16, 300, marks=pytest.mark.slow),
        pytest.param(jnp.float32, 300, marks=pytest.mark.slow),
    ],
)
def test_lowers_for_cuda(dtype, length):
    """Lower to Triton's language; the next steps need a GPU's compiler."""
    params, run = make_layer("kerple", PROCESSORS["W3"], heads=12, dtype=dtype)
    pos = jnp.arange(length)
    qkv = [jax.ShapeDtypeStruct((2, length, 12, 64), dtype)] * 3

    def loss(*args):
        return run(functools.partial(attend_fused, platform="gpu"), *args, pos, pos).astype(jnp.float32).sum()

    assert lower_for_cuda(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))), params, *qkv) == ALL_KERNELS


@OUTDATED
def test_lowers_for_cuda_on_a_mesh():
    """Lower with the check of varying axes, and rematerialised layers in a scan."""

    def layers(q, *args):
        @jax.checkpoint
        def layer(q, _):
            return attend_fused(q, *args, platform="gpu"), None

        return jax.lax.scan(layer, q, length=2)[0]

    step, args = on_mesh(layers, AbstractMesh((2,), ("data",), (AxisType.Auto,), abstract_device=H200))
    assert lower_for_cuda(step, *args) == ALL_KERNELS


# ---- rows of a block


@pytest.mark.parametrize(
    ("features", "length", "rows"),
    [
        (12, 200, 256),
        (12, 512, 256),
        (12, 2048, 512),
        (8 * 12, 2048, 256),
        (12, 8192, 640),
        (12, 131_072, 128),
    ],
)
def test_rows_of_a_block(features, length, rows):
    assert rows_in_block(features, length, length, 4) == rows
    if rows > 128:
        assert 4 * features * rows * length <= BLOCK_BYTES
    assert len(causal_runs(length, length, rows, 4, Mask())) == min(4, -(-length // rows))


def shape_of(batch: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, 2048, 12, 64), jnp.bfloat16)


def built(config: DapeConfig) -> Dape:
    return nnx.eval_shape(lambda: config.build(12, has_bias=False, rngs=nnx.Rngs(0)))


def test_blockwise_takes_as_many_rows_as_memory_allows():
    processor = built(DapeConfig(9, channels=32))  # wider than the kernels support
    for batch, auto, rows in ((8, Auto(), 128), (1, Auto(), 512), (1, Auto(64), 64)):
        q = shape_of(batch)
        assert auto.choose(q, q, ScoreMod(None, processor), platform="gpu") == Blockwise(rows, 4)


@pytest.mark.parametrize(
    ("capability", "is_fused"), [(None, True), ("9.0", True), ("8.0", True), ("7.5", False), ("gfx942", False)]
)
def test_auto_chooses_the_kernel_for_dape_where_the_gpu_can_run_it(monkeypatch, capability, is_fused):
    device = SimpleNamespace() if capability is None else SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    q, mod = shape_of(1), ScoreMod(None, built(PROCESSORS["W3"]))
    chosen = Auto().choose(q, q, mod, platform="gpu")
    assert isinstance(chosen, Fused if is_fused else Blockwise)
    reason = why_not_fused(q, q, mod, platform="gpu")
    assert (reason is None) == is_fused
    # 256 rows are one block of `Blockwise`.
    for length, expected in ((128, Dense), (256, Fused if is_fused else Dense)):
        short = jax.ShapeDtypeStruct((1, length, 12, 64), jnp.bfloat16)
        assert isinstance(Auto().choose(short, short, mod, platform="gpu"), expected)
    assert is_fused or f"compute capability 8.0 or more; this one has {capability!r}" in str(reason)


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


@pytest.fixture
def installed_cudnn(monkeypatch):
    """Make JAX's function lower without cuDNN."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91_000)


@pytest.mark.usefixtures("installed_cudnn")
@pytest.mark.parametrize("on_devices", [1, 2])
def test_plain_attention_lowers_to_cudnn(on_devices):
    """Lower also in a `shard_map` with the check of varying axes."""

    def plain(q, k, v, positions, _, mask):
        return attend_fused(q, k, v, positions, mask=mask, platform="gpu")

    mesh = AbstractMesh((on_devices,), ("data",), (AxisType.Auto,), abstract_device=H200)
    step, args = on_mesh(plain, mesh, jnp.bfloat16)
    assert lower_for_cuda(step, *args) == {"cudnn$fmhaSoftmax", "cudnn$fmhaSoftmaxBackward"}


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


def test_float64_is_refused(float64):
    params, run = make_layer("nope", PROCESSORS["W1"], heads=2)
    q = jnp.zeros((1, 4, 2, 4), jnp.float64)
    with pytest.raises(NotImplementedError, match="float64"):
        run(FUSED, params, q, q, q, jnp.arange(4), jnp.arange(4))
