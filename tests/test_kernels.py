"""Test the fused kernels and the other implementations with one suite.

The reference computes one row at a time in float64. Kernels are interpreted on CPU. The tests at the end of the file
compile them for TPUs with libtpu.

Compilation takes most of the time, so tests share programs: `compiled(case, implementation)` takes positions as
arguments, and returns values and all gradients.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx
from helpers import OF_POSITIONS, OnMesh, attend_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from benchmarks import tpu as benchmark
from dape_jax.config import read_model
from dape_jax.errors import InputError
from dape_jax.hardware import read_topology
from dape_jax.kernels import KERNELS, attend_fused, gpu, tpu, why_not_fused
from dape_jax.kernels.cuda import tiling
from dape_jax.model import attention
from dape_jax.model.attention import Auto, Blockwise, Cuda, Dense, Fused, attend, score
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import DapeConfig, Plain, ScoreMod
from dape_jax.model.scores import Mask, Positions, masked_softmax
from dape_jax.model.transformer import Transformer, attention_of
from dape_jax.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.extra

IMPLEMENTATIONS = {
    "dense": Dense(),
    "blockwise": Blockwise(block_size=32, num_buckets=3),
    **{platform: Fused(platform) for platform in KERNELS},
}
OF_DISTANCE = ["nope", *(name for name in OF_POSITIONS if name != "fire")]


@dataclasses.dataclass(frozen=True)
class Case:
    """Layer and its sizes."""

    bias: str = "kerple"
    width: int = 3
    alignment: str = "centered"
    inputs: str = "both"
    residual: bool = True
    channels: int = 5
    heads: int = 3
    groups: int = 3
    head_dim: int = 8
    batch: int = 1
    length: int = 45  # of keys; odd, and more than one block of rows
    row_stride: int = 1
    first: int | None = None  # column of the first row; rows end with the keys. None: length / row_stride rows
    window: int | None = None
    phases: int = 1  # of a tile of the TPU kernels
    plain: bool = False  # without a processor

    def layer(self, dtype=jnp.float32):
        """Return a bias and a processor with random parameters."""

        @nnx.jit
        def build():
            rngs = nnx.Rngs(0)
            bias = BIASES[self.bias]().build(self.heads, self.head_dim, rngs)
            if self.plain:
                return bias, Plain()
            options = {"alignment": self.alignment, "inputs": self.inputs, "residual": self.residual}
            config = DapeConfig(self.width, self.channels, **options)
            return bias, config.build(self.heads, has_bias=bias is not None, dtype=dtype, rngs=rngs)

        return build()

    def abstract_layer(self, dtype=jnp.float32):
        """Return a bias and a processor whose parameters have shapes and no values."""
        return nnx.eval_shape(functools.partial(self.layer, dtype))

    def arrays(self, dtype=jnp.float32):
        """Return queries, keys, values and the gradient of the output."""
        rows = len(self.positions()[0])
        sizes = [(rows, self.heads), (self.length, self.groups), (self.length, self.groups), (rows, self.heads)]
        draw = np.random.default_rng(1)
        return [
            draw.standard_normal((self.batch, n, heads, self.head_dim), np.float32).astype(dtype) for n, heads in sizes
        ]

    def positions(self):
        """Return the positions of queries and keys."""
        k_pos = np.arange(self.length, dtype=np.int32)
        if self.first is not None:
            return k_pos[self.first :: self.row_stride], k_pos
        return k_pos[self.row_stride // 2 :: self.row_stride][: self.length // self.row_stride], k_pos

    def run(self, implementation, layer=None):
        """Return a jitted function of parameters, arrays and positions to the output and all gradients; parameters."""
        graphdef, params = nnx.split(layer or self.layer())

        def forward(params, q, k, v, q_pos, k_pos):
            bias, processor = nnx.merge(graphdef, params)
            if not self.plain:
                processor.dtype = None if jnp.promote_types(q.dtype, jnp.float32) == q.dtype else q.dtype
            mask = Mask(window=self.window, row_stride=self.row_stride)
            return attend_rows(implementation, q, k, v, q_pos, k_pos, ScoreMod(bias, processor), mask)

        @jax.jit
        def both(params, q, k, v, dout, q_pos, k_pos):
            out, pullback = jax.vjp(lambda *args: forward(*args, q_pos, k_pos), params, q, k, v)
            return out, pullback(dout.astype(out.dtype))

        return both, nnx.to_pure_dict(params)


class RowByRow:
    """Compute every row by itself with `Dense`."""

    def attend_rows(self, q, k, v, positions, *score_mod_and_mask):
        def row(q_and_pos):
            q, pos = q_and_pos
            return attend_rows(Dense(), q[:, None], k, v, pos[None], positions.k_pos_S, *score_mod_and_mask)[:, 0]

        return jnp.moveaxis(jax.lax.map(row, (jnp.moveaxis(q, 1, 0), positions.q_pos_T)), 0, 1)


@functools.cache
def expected(case: Case, dtype=jnp.float32):
    """Return the reference result in float64, for arrays that are rounded to a dtype."""
    both, params = case.run(RowByRow())
    with jax.enable_x64(True):
        arrays = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, *case.arrays(dtype)))
        return jax.device_get(both(*arrays, *case.positions()))


@functools.lru_cache(maxsize=5)
def compiled(case: Case, implementation: str):
    """Return values and all gradients as a function of q, k, v, dout, q_pos and k_pos, compiled.

    Tests share the few programs that are compiled by default; more would hold too many memory mappings (`conftest.py`).
    Blocks have 32 rows on TPUs and 16 on GPUs, with bands of 16 offsets and taps in a loop if there are more than five,
    so that few rows have several blocks, bands and runs. Chunks of the CUDA kernels have few tiles.
    """
    both, params = case.run(IMPLEMENTATIONS[implementation])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu.tiling, "BLOCKS", (32,))
        patch.setattr(tpu.tiling, "PHASES", (case.phases,))
        patch.setattr(gpu, "rows_in_block", lambda *_: 16)
        for name, value in {"BAND_WIDTH": 16, "NUM_RUNS": 2, "MAX_UNROLLED": 1500}.items():
            patch.setattr(gpu, name, value)
        patch.setattr(tiling, "LEAST_TILES", {"forward": 2, "backward": 2})
        program = both.lower(params, *case.arrays(), *case.positions()).compile()
    return functools.partial(program, params)


CASES = {
    "kerple3": Case(groups=1, heads=2, batch=2, length=136, first=100),  # two blocks of rows, two tiles
    # A tile of 32 columns begins in the window of row 64, and hidden columns to its left count.
    "alibi-causal4": Case("alibi", width=4, alignment="causal", length=70, window=33, phases=2),
}
# Two blocks of rows, whose tables three sequences share.
ONE_TILE = Case(heads=2, groups=1, channels=3, batch=3, length=128, first=88)
MORE = {
    "t5-5": Case("t5", width=5, channels=32, length=140),
    "nope7": Case("nope", width=7, head_dim=20, heads=17, groups=17, length=33),
    "kerple1": Case(width=1, length=130),
    "one-token": Case(length=1),
    "sandwich3": Case("sandwich"),
    "kerple-power3": Case("kerple_power", length=64),
    "equation2": Case(residual=False),
    "inputs-scores": Case(inputs="scores"),
    "inputs-bias": Case("alibi", inputs="bias", width=5),
    "causal2": Case(width=2, alignment="causal"),
    "window": Case(window=7, length=150, width=5),
    "window-of-one": Case(window=1),
    "three-tiles": Case("alibi", length=300, width=7, channels=16),
    # The last tile of the backward pass begins at column 1,920: it owns only hidden columns beyond the last piece.
    "seventeen-tiles": Case(heads=2, groups=1, channels=3, length=1920, row_stride=64),
    # A tile with all keys, but not all hidden columns that the last rows read.
    "full-tile": Case(length=128, heads=12, groups=4),
    "full-tile-7": Case("t5", width=7, length=127, heads=5, groups=5, window=90),
    "full-tile-row-stride": Case(width=5, length=256, row_stride=4, first=3, heads=2, groups=1, batch=2, phases=2),
    "many-heads": Case(heads=32, groups=2, channels=40, length=40),
    "wide-heads": Case(head_dim=128, heads=2, groups=2, channels=64),
    "row-stride-and-window": Case(row_stride=4, length=160, window=30, alignment="causal", width=3),
    # Tiles of four phases have 508 columns: for two of them few rows are enough, since the interpreter is slow.
    "four-phases": Case(heads=5, groups=5, channels=20, length=530, row_stride=5, phases=4),
    "four-phases-causal7": Case("t5", width=7, alignment="causal", length=560, window=90, row_stride=7, phases=4),
    "four-phases-every-row": Case(heads=2, groups=1, channels=3, length=514, phases=4),
    "four-phases-row-stride-16": Case(batch=2, row_stride=16, length=544, phases=4),
}


PLAIN = {"plain": Case(plain=True, heads=4, groups=1, batch=2, length=150)}
MORE_PLAIN = {
    "plain-nope": Case("nope", plain=True, heads=17, groups=17, length=280, phases=2),
    "plain-t5-window": Case("t5", plain=True, heads=12, groups=4, length=560, window=70, phases=4),
    "plain-alibi-row-stride-8": Case("alibi", plain=True, row_stride=8, length=168),
    "plain-kerple-power": Case("kerple_power", plain=True, heads=5, groups=5, head_dim=20, length=64),
    "plain-sandwich": Case("sandwich", plain=True, row_stride=2, length=540, window=30, phases=4),
    "plain-one-token": Case(plain=True, length=1),
}


# Phases are the TPU kernels'. Tables of rows 64 columns apart do not fit into the shared memory of a GPU.
FOR_CUDA = {name: case for name, case in (MORE | MORE_PLAIN).items() if case.phases < 4 or case.row_stride == 16}
del FOR_CUDA["seventeen-tiles"]

EXHAUSTIVE = pytest.mark.exhaustive
HAS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator of CUDA needs g++")


def each(cases: dict[str, Case], *implementations: str) -> list:
    return [
        pytest.param(case, implementation, id=f"{name}-{implementation}", marks=marks)
        for name, case in cases.items()
        for implementation in implementations
        for marks in [[HAS_COMPILER] if implementation == "cuda" else []]
    ]


def slowly(cases: list) -> list:
    return [pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow]) for case in cases]


def assert_close(found, exact, tolerance: float, output_bias: float = 0) -> None:
    """Compare trees, with errors relative to the largest number of each array, or to 1 if that is larger.

    `output_bias` is the absolute error of the gradient of `output_bias_H` that is allowed, if it is more.
    """
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(exact), strict=True):
        name = jax.tree_util.keystr(path[-1:])
        # The gradient of a bias's parameter sums terms over all pairs that are larger than the sum.
        sums = 5 if name in ("['p_H']", "['a_H']", "['table_NH']") else 1
        least = output_bias if name == "['output_bias_H']" else 0
        close = {"rtol": 0, "atol": max(least, sums * tolerance * max(1.0, float(np.abs(y).max())))}
        np.testing.assert_allclose(np.asarray(x, np.float64), y, **close, err_msg=jax.tree_util.keystr(path))


def rounding_of_output_bias(case: Case, arrays: list) -> float:
    """Return the error that float32 may have in the gradient of `output_bias_H`, which is 0.

    The gradient sums p (dout . v - sum over keys of p dout . v) over rows and keys, with p the probabilities. The sum
    of a row is 0. Its error is within eps times the sum of |p dout v| over keys and features, which grows with the
    size of heads. The errors of rows are independent, so their squares add. The smallest result of all heads counts.
    """
    bias, processor = case.layer()
    _, _, v, dout = arrays
    scores = score(*map(jnp.asarray, (*arrays[:2], *case.positions())), bias=bias, window=case.window)
    probs_BHTS = masked_softmax(processor(*scores), scores.mask)
    v_BSHK = np.repeat(v, case.heads // case.groups, axis=2)
    sums_BTH = np.einsum("BHTS,BTHK,BSHK->BTH", probs_BHTS, np.abs(dout), np.abs(v_BSHK), optimize=True)
    return float(np.finfo(np.float32).eps * np.sqrt((sums_BTH**2).sum((0, 1)).min()))


@pytest.mark.parametrize(
    ("case", "implementation"),
    each({"one-tile": ONE_TILE} | PLAIN, "tpu")
    + each({"alibi-causal4": CASES["alibi-causal4"]}, "gpu")
    + each(CASES | PLAIN, "cuda")
    + slowly(each({"kerple3": CASES["kerple3"]}, "gpu") + each(CASES, "tpu", "dense", "blockwise"))
    + slowly(each(MORE | MORE_PLAIN, "tpu") + each(FOR_CUDA, "cuda"))
    + slowly(each(MORE, "gpu")[::3] + each(MORE | MORE_PLAIN, "dense", "blockwise")[::3]),
)
def test_values_and_all_gradients_equal_one_row_at_a_time(case, implementation):
    """Check also that two calls return the same bits, and that rows and gradients do not depend on later tokens."""
    run, arrays, positions = compiled(case, implementation), case.arrays(), case.positions()
    found = jax.device_get(run(*arrays, *positions))
    tolerance = 3e-5 if case.bias == "sandwich" else 1e-5
    assert_close(found, expected(case), tolerance, rounding_of_output_bias(case, arrays))

    # Change the tokens after row t, whose column is `end - 1`.
    t = arrays[0].shape[1] // 2
    end = int(positions[0][t]) + 1
    q, k, v, dout = arrays
    changed = [np.concatenate([x[:, :n], 7 + x[:, n:]], 1) for x, n in ((q, t + 1), (k, end), (v, end))]
    early = np.concatenate([dout[:, : t + 1], np.zeros_like(dout[:, t + 1 :])], 1)
    before, (_, *gradients) = jax.device_get(run(q, k, v, early, *positions))
    after, _ = jax.device_get(run(*changed, dout, *positions))
    np.testing.assert_array_equal(before, found[0])
    np.testing.assert_array_equal(before[:, : t + 1], after[:, : t + 1])
    for gradient, n in zip(gradients, (t + 1, end, end), strict=True):
        np.testing.assert_array_equal(gradient[:, n:], 0)
        assert case.length == 1 or case.window == 1 or np.abs(gradient[:, :n]).max() > 1e-4


@functools.cache
def errors_in_bfloat16(case: Case, implementation: str) -> list[float]:
    """Return the relative error of the output and of each gradient."""
    both, params = case.run(IMPLEMENTATIONS[implementation])
    found = jax.device_get(both(params, *case.arrays(jnp.bfloat16), *case.positions()))
    assert found[0].dtype == jnp.bfloat16
    return [
        float(np.linalg.norm(np.asarray(x, np.float64) - y) / (1e-3 + np.linalg.norm(y)))
        for x, y in zip(*map(jax.tree.leaves, (found, expected(case, jnp.bfloat16))), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        *each({"dape": Case(channels=16)}, *KERNELS),
        pytest.param(Case("alibi", plain=True), "tpu", id="plain-tpu", marks=EXHAUSTIVE),
    ],
)
def test_bfloat16_is_as_accurate_as_dense(case, implementation):
    """Use a bias without parameters if there is no processor: gradients would cancel to less than rounding."""
    for ours, dense in zip(*(errors_in_bfloat16(case, each) for each in (implementation, "dense")), strict=True):
        assert ours < max(1.5 * dense, 2e-3)


@pytest.mark.extra
def test_the_mean_of_a_rows_gradients_is_that_of_the_output_before_rounding():
    """The gradient of Kerple's `a` nearly cancels; with the rounded output it is five times as far off."""
    case = Case(channels=8, heads=2, groups=2)
    (_, ours, *_), (_, dense, *_) = (errors_in_bfloat16(case, implementation) for implementation in ("cuda", "dense"))
    assert ours < 2.5 * dense < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "num_rows"),
    [
        # Two blocks and few channels: the interpreter is slow. No row reads the last of three tiles.
        pytest.param(Case(heads=2, groups=1, channels=3, length=280, row_stride=4), 38, id="every-fourth"),
        pytest.param(ONE_TILE, 40, id="one-tile"),
        pytest.param(Case(plain=True, heads=2, groups=1, length=136), 136, id="plain"),
        pytest.param(Case(heads=2, groups=1, channels=3, length=136, first=100), 36, id="last", marks=EXHAUSTIVE),
        pytest.param(Case(length=528, row_stride=16, phases=4), 33, id="four-phases", marks=EXHAUSTIVE),
    ],
)
def test_the_tpu_kernel_accesses_memory_correctly(case, num_rows, monkeypatch):
    """Run with NaNs in uninitialised memory, copies delayed to their waits, and detection of races.

    Races are looked for with DAPE and several tiles: all cases make the same copies, and the time of the search is
    quadratic in the number of accesses.
    """
    monkeypatch.setattr(tpu.tiling, "BLOCKS", (32,))
    monkeypatch.setattr(tpu.tiling, "PHASES", (case.phases,))
    options = {"uninitialized_memory": "nan", "dma_execution_mode": "on_wait"}
    careful = pltpu.InterpretParams(**options, detect_races=case.length > 128 and not case.plain)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    score_mod, mask = ScoreMod(*case.layer()), Mask(row_stride=case.row_stride)
    (q, k, v, dout), (q_pos, k_pos) = case.arrays(), case.positions()
    q, dout, q_pos, k_pos = q[:, :num_rows], dout[:, :num_rows], jnp.asarray(q_pos[:num_rows]), jnp.asarray(k_pos)

    def run(implementation, q, k, v):
        return attend_rows(implementation, q, k, v, q_pos, k_pos, score_mod, mask)

    fused = functools.partial(attend_fused, platform="tpu", interpret=careful)
    out, pullback = jax.jit(functools.partial(jax.vjp, functools.partial(run, fused)))(q, k, v)
    out = jax.device_get(out)
    assert not interpret_pallas_call.races.races_found, "in the forward pass"
    gradients = jax.device_get(jax.jit(lambda pullback, dout: pullback(dout))(pullback, dout))
    assert not interpret_pallas_call.races.races_found, "in the backward pass"

    @jax.jit
    def dense(q, k, v, dout):
        out, pullback = jax.vjp(functools.partial(run, Dense()), q, k, v)
        return out, pullback(dout)

    assert_close((out, gradients), jax.device_get(dense(q, k, v, dout)), 1e-5)


def shapes(case: Case, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(x.shape, dtype) for x in case.arrays()[:2]]


def test_unsupported_arguments_are_refused_with_the_reason():
    def ask(case=Case(), dtype=jnp.float32, platform="tpu", **options):
        """Return the reason for the layer of a case, or for the modules in `options`."""
        bias, processor = case.abstract_layer()
        score_mod = ScoreMod(options.pop("bias", bias), options.pop("processor", processor))
        return why_not_fused(*shapes(case, dtype), score_mod, platform=platform, **options)

    for bias in OF_DISTANCE:
        assert ask(Case(bias)) is None
    assert ask(bias=None, processor=Plain()) is None
    assert "cuDNN takes bfloat16" in ask(bias=None, processor=Plain(), platform="gpu")
    assert "'cpu'" in ask(platform="cpu")
    assert "Quantum" in ask(device_kind="Quantum TPU")
    assert "causal = False" in ask(mask=Mask(causal=False))
    assert "positions are given" in ask(mask=Mask(row_stride=None))
    for changes, words in (
        ({"heads": 65, "groups": 65}, ("H = 65", "64")),
        ({"head_dim": 136}, ("K = 136", "128")),
        ({"channels": 65}, ("C = 65", "64")),
        ({"width": 9}, ("W = 9", "7")),
    ):
        assert all(word in ask(Case(**changes)) for word in words)
    for name in set(BIASES) - set(OF_DISTANCE):
        bias = nnx.eval_shape(lambda name=name: BIASES[name]().build(3, 8, nnx.Rngs(0)))
        assert type(bias).__name__ in ask(bias=bias)
        assert type(bias).__name__ in ask(bias=bias, processor=Plain())
    for options in ({"leak": True}, {"edge": "listing"}):
        config = DapeConfig(3, 5, **options)
        processor = nnx.eval_shape(lambda config=config: config.build(3, has_bias=False, rngs=nnx.Rngs(0)))
        assert next(iter(options)) in ask(bias=None, processor=processor)
    assert ask(Case(head_dim=7)) is None
    assert "even number in bfloat16" in ask(Case(head_dim=7), jnp.bfloat16)
    assert "float64" in ask(dtype=np.float64)
    assert "v is bfloat16; the kernels take" in ask(v_dtype=jnp.bfloat16)
    assert "float16" in ask(processor=Case().abstract_layer(jnp.float16)[1])
    q, k = shapes(Case())
    run = functools.partial(attend_fused, mask=Mask(causal=False), platform="tpu")
    with pytest.raises(NotImplementedError, match="causal = False"):
        jax.eval_shape(run, q, k, k, Positions(*Case().positions()))
    with pytest.raises(InputError, match="abacus"):
        Fused("abacus")
    (bias, processor), (_, without_bias) = Case().abstract_layer(), Case("nope").abstract_layer()
    for of_layer in ({"processor": processor}, {"bias": bias, "processor": without_bias}):
        with pytest.raises(InputError, match="has_bias"):
            jax.eval_shape(functools.partial(attend, **of_layer, implementation=Fused("gpu")), q, k, k)


def test_a_config_with_an_unsupported_kernel_is_refused():
    spec = copy.deepcopy(tiny.SPEC["model"]) | {"attention": {"name": "fused"}}
    with pytest.raises(InputError, match=r"attention\.name = 'fused'.*'cpu'"):
        attention_of(read_model(spec), 64, "cpu")
    assert attention_of(read_model(spec), 64, "tpu", "TPU v5 lite") == Fused()
    cuda = read_model(spec | {"attention": {"name": "cuda"}})
    assert attention_of(cuda, 64, "gpu") == Cuda()
    for platform in ("cpu", "tpu"):
        with pytest.raises(InputError, match=rf"attention\.name = 'cuda'.*NVIDIA GPU, not the platform '{platform}'"):
            attention_of(cuda, 64, platform)
    with pytest.raises(NotImplementedError, match="NVIDIA GPU, not the platform 'cpu'"):
        attend(*map(jnp.asarray, Case().arrays()[:3]), implementation="cuda")
    fire = read_model(spec | {"bias": {"name": "fire"}})
    with pytest.raises(InputError, match="Fire"):
        attention_of(fire, 64, "tpu", "TPU v5 lite")
    layers = {"attention": {"name": "auto"}, "alternate_layers": [0], "alternate_window": 8}
    mixed = read_model(spec | {"bias": {"name": "fire"}} | layers)
    chosen = [attention_of(mixed, 64, "tpu", "TPU v5 lite", kind=kind) for kind in range(2)]
    assert chosen == [Blockwise(32, 1), Blockwise(32, 2)]  # with one bucket every block would read all keys


def on(kind: str):
    """Pretend that the devices are of another kind."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=kind.split()[0].lower())
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device))


def test_auto_chooses_by_platform_length_and_support_and_logs_it_once(caplog):
    def choice(implementation, bias=None, window=None):
        args = *shapes(case, jnp.bfloat16), ScoreMod(bias or kerple, processor), Mask(window=window)
        return implementation.choose(*args, platform=attention.device_platform())

    attention._log_choice.cache_clear()
    case = Case(length=300)
    (kerple, processor) = case.abstract_layer()
    fire = nnx.eval_shape(lambda: BIASES["fire"]().build(3, 8, nnx.Rngs(0)))
    with caplog.at_level(logging.INFO, "dape_jax"):
        with on("TPU v5 lite"):
            assert choice(Auto()) == choice(Auto(16, 2)) == Fused()
            assert isinstance(choice(Auto(), bias=fire), Blockwise)
            assert choice(Auto(512)) == Dense()
            windowed = choice(Auto(), bias=fire, window=64)
            assert windowed == Blockwise(32, 2), "with one bucket, every block reads all keys"
            jax.eval_shape(
                lambda bias, *qkv: attend(*qkv, bias=bias), kerple, *shapes(case), shapes(case, jnp.bfloat16)[1]
            )
        with on("GPU of tomorrow"):
            assert choice(Auto()) == choice(Auto(16, 2)) == Fused()
            assert choice(Auto(16, 2), bias=fire) == Blockwise(16, 2)
            assert choice(Auto(), bias=fire) == Blockwise(256, 4)
        assert choice(Auto()) == attention.BLOCKWISE["cpu"]
        assert choice(Auto()) == attention.BLOCKWISE["cpu"]
        processor = Plain()
        assert [choice(Auto()), choice(Auto(16))] == [Blockwise(128, 4), Blockwise(16, 4)]
    said = [record.message for record in caplog.records if record.name.startswith("dape_jax")]
    assert len(said) == len(set(said)) == 10
    assert sum("Fire is not a DistanceBias" in line for line in said) == 4


def test_auto_equals_the_implementation_that_it_chooses():
    """Compare the programs of values and all gradients."""
    blockwise = attention.BLOCKWISE["cpu"]
    for length, chosen, other in [(20, Dense(), blockwise), (45, blockwise, Dense())]:
        case = Case(length=length)
        layer = case.abstract_layer()

        def program(implementation, case=case, layer=layer):
            both, params = case.run(implementation, layer)
            return str(both.trace(params, *case.arrays(), *case.positions()).jaxpr)

        assert program(Auto()) == program(chosen) != program(other)


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite"])
@pytest.mark.parametrize("sizes", [(12, 64), (16, 64), (32, 80), (32, 128)])
def test_blocks_fit_into_vmem(kind, sizes):
    """Check that blocks fit, or that the reason says that none does."""
    heads, head_dim = sizes
    for length in (2048, 131_072):
        q = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16)
        is_too_large = kind == "TPU v4" and heads > 16
        refused = pytest.raises(NotImplementedError, match="MiB of VMEM; TPU v4 has")
        with on(kind), refused if is_too_large else contextlib.nullcontext():
            tpu.tilings(q, q, (3, 1, 32), dtype=q.dtype)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_tiles_own_every_column_that_counts(data):
    """`tile_range` and `block_range` are inverse. Like groups, they cover every column that a row reads."""
    rows = data.draw(st.integers(1, 400), "T")
    row_stride = data.draw(st.sampled_from([1, 2, 8]), "row_stride")
    first = data.draw(st.integers(0, 500), "column of the first row")
    keys = first + row_stride * (rows - 1) + 1 + data.draw(st.integers(0, 900), "keys after the last row")
    window = data.draw(st.none() | st.integers(1, 500), "window")
    width, causal = data.draw(st.sampled_from([1, 2, 3, 5, 7]), "W"), data.draw(st.booleans(), "causal")
    backward = data.draw(st.booleans(), "backward")
    pad = width - 1 if causal else width // 2
    block_rows = data.draw(st.sampled_from(tpu.tiling.BLOCKS), "block_rows")
    phases = data.draw(st.sampled_from(tpu.tiling.PHASES), "phases")
    t = tpu.Tiling(
        num_rows=rows, num_keys=keys, num_heads=2, num_groups=2, head_dim=8, width=width, pad=pad, num_channels=4,
        row_stride=row_stride, window=window, block_rows=block_rows, phases=phases, backward=backward,
        dtype=jnp.dtype(jnp.float32), vmem_limit_bytes=0, interpret=True,
    )  # fmt: skip
    assert t.owned_columns > 0
    reach, ahead = keys if window is None else window, t.ahead * backward
    needed = set()
    for row in range(rows):
        column = first + row_stride * row
        for read in (max(column - reach + 1 - pad * backward, 0), column + ahead):
            tile = 0 if t.is_single else read // t.owned_columns
            needed.add((row // t.block_rows, tile, row % t.block_rows // tpu.tiling.GROUP_ROWS))
    taken = set()
    lows, highs = (np.broadcast_to(x, t.num_tiles) for x in t.block_range(np.arange(t.num_tiles), first))
    for block in range(t.num_blocks):
        begin, end = (int(x) for x in t.tile_range(block, first, np))
        assert 0 <= begin <= end < t.num_tiles
        for tile in range(begin, end + 1):
            assert lows[tile] <= block <= highs[tile]
            step = t.step(block, tile, first)
            first_group, end_group = (int(x) for x in step.groups(np))
            assert 0 <= first_group < end_group <= t.block_rows // tpu.tiling.GROUP_ROWS
            taken |= {(block, tile, group) for group in range(first_group, end_group)}
            used = np.arange(first_group * tpu.tiling.GROUP_ROWS, end_group * tpu.tiling.GROUP_ROWS)
            for phase in range(phases):
                remainder, column = step.table_position(used, phase)
                assert 0 <= remainder.min() <= remainder.max() < phases
                start = (column - step.slab_start) // tpu.tiling.LANES * tpu.tiling.LANES
                assert 0 <= start.min() <= start.max() <= t.slab_columns - 2 * tpu.tiling.LANES
            assert 0 <= step.slab_start <= t.table_columns - t.slab_columns
    assert needed <= taken
    steps = t.steps
    begin, end = t.tile_range(np.arange(t.num_blocks), 0, np)
    assert len(steps.key_column) == (end - begin + 1).sum()
    assert set(steps.key_column) <= {t.step(0, tile, 0).key_column for tile in range(t.num_tiles)}


@pytest.mark.parametrize(("length", "phases"), [(100, 1), (128, 1), (129, 2), (256, 2), (257, 4), (4096, 4)])
def test_a_tile_holds_no_more_than_all_keys(length, phases):
    q = jax.ShapeDtypeStruct((1, length, 12, 64), jnp.bfloat16)
    forward, backward = tpu.tilings(q, q, (3, 1, 32), dtype=q.dtype, device_kind="TPU v5 lite")
    assert (forward.phases, backward.phases) == (phases, phases)
    assert forward.is_single == backward.is_single == (length <= 512)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "changes"),
    [("tpu", {"processor": {"name": "none"}}), ("gpu", {}), ("cuda", {}), pytest.param("tpu", {}, marks=EXHAUSTIVE)],
)
def test_rematerialised_layers_in_a_scan(implementation, changes):
    """Compare the loss and all gradients of a language model with those of `dense`."""
    tokens = jax.random.randint(jax.random.key(0), (1, 20), 0, 257)

    def loss_and_gradients(attention):
        spec = copy.deepcopy(tiny.SPEC["model"]) | {"remat": "full", "attention": attention} | changes
        model = Transformer(read_model(spec), rngs=nnx.Rngs(0))

        @nnx.jit
        @nnx.value_and_grad
        def loss(model):
            logits = model(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        loss, gradients = loss(model)
        return loss, nnx.to_pure_dict(gradients)

    found, dense = map(loss_and_gradients, ({"name": "fused", "platform": implementation}, {"name": "dense"}))
    assert_close(jax.device_get(found), jax.device_get(dense), 1e-6)


STRIPED = Case(heads=4, groups=2, batch=2, length=72)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "plain"),
    [((1, 1, 2, 1), True), *(pytest.param(x, False, marks=EXHAUSTIVE) for x in ((1, 1, 2, 1), (1, 2, 1, 1)))],
)
def test_striped_rows_equal_one_device(sizes, plain):
    """Divide batch and rows over devices; compare values and all gradients with the reference.

    At most two devices: devices that wait for each other inside the interpreter need a core each, or never finish.
    """
    with jax.set_mesh(make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])):
        case = dataclasses.replace(STRIPED, plain=plain)
        both, params = case.run(OnMesh(Fused("tpu")))
        found = jax.device_get(both(params, *case.arrays(), *case.positions()))
    assert_close(found, expected(case), 1e-5)


CHANGES = [{}, {"bias": "nope"}, {"width": 1}, {"inputs": "scores"}, {"inputs": "bias"}, {"residual": False}]


@pytest.mark.parametrize(
    ("changes", "implementation"),
    [
        ({}, "gpu"),
        ({"bias": "nope"}, "tpu"),
        ({"plain": True}, "tpu"),
        ({"inputs": "bias"}, "tpu"),
        *(
            pytest.param(changes, implementation, marks=pytest.mark.slow)
            for changes, implementation in itertools.product(CHANGES, KERNELS)
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())),
)
def test_every_kind_of_operator_can_be_traced_on_a_mesh(changes, implementation, monkeypatch):
    """Operands of a kernel must all vary over the same mesh axes, even if they are constant in some operators."""
    case = dataclasses.replace(STRIPED, **changes)
    if implementation != "cuda":  # only traced in the emulator
        monkeypatch.setattr(attention, "device_platform", lambda: implementation)
    with jax.set_mesh(make_mesh(MeshConfig(1, 2, 2, 2), jax.devices())):
        both, params = case.run(OnMesh(Fused(implementation)), case.abstract_layer())
        out, gradients = jax.eval_shape(both, params, *case.arrays(), *case.positions())
    assert out.shape == case.arrays()[0].shape
    assert jax.tree.structure(gradients[0]) == jax.tree.structure(params)


# ---- Compiled ahead of time for TPUs


def compile_for(
    libtpu, topology: str, model: str, length: int, direction: str = "backward", processor: str = "dape"
) -> dict:
    settings = benchmark.Settings((topology,), (length,), (model,), (direction,), (processor,))
    (request,) = benchmark.requests_of(settings)
    row = benchmark.measure(request, libtpu)
    assert row["fits"], row["reason"]
    return row


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v4:2x2x1", pytest.param("v5e:2x2", marks=EXHAUSTIVE)])
def test_a_layer_on_a_tpu_has_no_scores_in_memory(libtpu, topology):
    """Without the kernel, XLA needs 7.3 GiB and 54 GB of traffic; the scores of 12 heads in bfloat16 are 96 MiB.

    v4 has the least VMEM and no arithmetic in bfloat16: a kernel that it takes compiles for the others.
    """
    row = compile_for(libtpu, topology, "125m", 2048)
    assert row["temporary_mib"] < 50
    naive_ms = 1e3 * 54e9 / read_topology(topology).chip.hbm_bytes_per_second
    assert row["kernels_ms"] + row["other_ms"] < naive_ms / 10
    assert row["bandwidth_ms"] < row["kernels_ms"]
    # The compiled program includes the cost estimate of the kernels, which planning reads.
    assert row["hbm_bytes"] > sum(kernel["bytes"] for kernel in row["kernels"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "model", "length", "direction", "processor", "limit_mib"),
    [
        ("v6e:2x2", "125m", 2048, "backward", "plain", None),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("v4:2x2x1", "350m", 2048, "backward", "dape", None),
                ("v5e:2x2", "2.7b", 2048, "backward", "dape", None),
                # The backward pass takes minutes: `results/tpu/chips-6.7b-8192`.
                ("v5p:2x2x1", "6.7b", 2048, "forward", "dape", None),
                ("v6e:2x2", "125m", 2048, "backward", "dape", None),
                # Memory is linear in length. Without the kernel, a layer does not fit at 8192.
                ("v5e:2x2", "125m", 32_768, "backward", "dape", 1.2 * 16 * 50),
                ("v5e:2x2", "125m", 131_072, "forward", "dape", 2500),
            )
        ),
    ],
)
def test_the_kernels_compile_for_other_chips_and_sizes(
    libtpu, topology, model, length, direction, processor, limit_mib
):
    row = compile_for(libtpu, topology, model, length, direction, processor)
    assert row["kernels_ms"] > 0
    assert row["other_ms"] > 0
    assert limit_mib is None or row["temporary_mib"] < limit_mib


def test_a_schedule_is_read_from_a_listing():
    """Labels and loops divide it. Two loops over groups, each between its beginning and its end."""
    sizes = {"start": 2, "scores": 5, "begin 1": 3, "loop 1": 7, "end 1": 4, "begin 2": 2, "loop 2": 6, "end 2": 3}
    listing, address = [], 0
    for region, size in (sizes | {"values": 5, "clear": 8}).items():
        has_matmul, in_loop = region not in ("start", "clear"), region.startswith("loop")
        for i in range(size):
            label = {"loop": "LB", "end": "PF"}[region.split()[0]] if i == 0 and region[:3] in ("loo", "end") else ""
            depth = "> >" if in_loop else "" if region == "start" else ">"
            unit = "vmatmul" if has_matmul and i == size - 1 else "vadd"
            listing.append(f" {address:#x} {label}: {depth} {{ %v{address} = {unit} }}")
            address += 1
        if region in ("scores", "end 1", "end 2", "values"):  # the end of a condition
            listing.append(f" {address:#x} PF: > {{ %s1 = sadd }}")
            address += 1
    regions = benchmark.read_regions("\n".join(listing))
    assert [region.num_bundles for region in regions] == [2, 5, 4, 7, 4, 3, 6, 3, 6, 9]
    runs = {"steps": 10, "first_tile_steps": 4, "groups": 110, "iterations": 100, "first_tile_iterations": 30}
    runs["outer_steps"] = 3
    per_step = 10 * (5 + 6) + 3 * (2 + 9)
    assert benchmark.count_bundles(regions, runs) == per_step + 4 * (4 + 4) + 6 * (3 + 3) + 30 * 7 + 70 * 6
    one_loop = regions[:2] + regions[5:]
    assert benchmark.count_bundles(one_loop, runs) == per_step + 10 * (3 + 3) + 100 * 6
    prepared = [benchmark.Region(1, 9, False), benchmark.Region(2, 5, False), *one_loop]
    total = benchmark.count_bundles(one_loop, runs) + 2 * 9 + (15 + 7) * 5
    assert benchmark.count_bundles(prepared, runs | {"tables": [16, 8]}) == total
