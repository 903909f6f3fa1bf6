"""FLOPs by formula equal XLA's count; plans are those of the compiler for TPUs, and of results/planning to 1 %."""

import dataclasses
import json
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from processes import ROOT, run_python
from tiny import ARCHITECTURES, SPEC

from dape_jax.config import RunConfig, choose
from dape_jax.errors import InputError
from dape_jax.hardware import CHIPS, CLOUD_NAMES, GIB, TOPOLOGIES, chip_of, mfu, read_topology
from dape_jax.model import flops
from dape_jax.model.processors import DapeConfig
from dape_jax.model.scores import Mask, Positions
from dape_jax.model.transformer import model_structure
from dape_jax.planning import compile as compiling
from dape_jax.planning import plan as planning
from dape_jax.planning.__main__ import Settings
from dape_jax.recipes import read_config
from dape_jax.sharding import MeshConfig, make_mesh, read_mesh
from dape_jax.training.step import Training, abstract_state, make_train_step


def make_run(**changes) -> RunConfig:
    """Return the tiny run with changes of dotted fields, . as __; no corpus is needed."""
    return planning.run_to_plan(tiny.changed(SPEC, data__cache_dir="data", **changes))


def test_automatic_fields_are_those_on_a_tpu():
    run = make_run(model__dtype="auto", model__vocab_multiple=None)
    assert (run.model.dtype, run.model.padded(257)) == ("bfloat16", 384)


# ---- FLOPs


@pytest.mark.parametrize(("length", "window"), [(1, None), (9, None), (9, 1), (9, 4), (9, 9), (9, 12)])
def test_pairs_are_those_of_the_mask(length, window):
    positions = jnp.arange(length)
    assert flops.num_pairs(length, window) == int(Mask(window=window).visible(Positions(positions, positions)).sum())


@pytest.mark.parametrize(("inputs", "has_bias"), [("both", True), ("both", False), ("scores", True), ("bias", True)])
def test_pair_flops_of_a_processor_are_those_of_its_kernels(inputs, has_bias):
    config = DapeConfig(kernel_width=3, channels=5, inputs=inputs)
    module = config.build(4, has_bias=has_bias, rngs=nnx.Rngs(0))
    of_scores, of_bias = (0 if kernel is None else kernel.size for kernel in (module.scores_WHC, module.bias_WHC))
    assert config.pair_flops(4, has_bias) == (2 * (of_scores + module.output_WCH.size), 2 * of_bias)


DAPE = {"name": "dape", "channels": 32}
SIZES = {"num_layers": 1, "width": 512, "num_heads": 4, "vocab_size": 2048}
OTHER = {"num_kv_heads": 2, "head_dim": 96, "mlp_width": 1280}


@pytest.mark.parametrize(
    ("model", "processor", "allowed"),
    [
        ({"bias": {"name": "kerple"}}, DAPE, 0.04),
        ({"bias": {"name": "transformer_xl"}}, DAPE, 0.25),  # the bias itself is not counted
        (ARCHITECTURES["pythia"] | OTHER, {"name": "none"}, 0.05),
        (ARCHITECTURES["llama"] | OTHER, {"name": "none"}, 0.05),
    ],
)
@pytest.mark.extra
def test_the_formula_agrees_with_xla(model, processor, allowed):
    """Compare one dense layer, which has no loop, with the compiler's own count, which includes elementwise work."""
    model = SIZES | {"bias": {"name": "nope"}, "processor": processor} | model
    sizes = {"train__train_length": 256, "train__batch_size": 3}
    run = make_run(**{f"model__{field}": value for field, value in model.items()}, **sizes)
    graphdef, params = model_structure(run.model)
    tokens = jax.ShapeDtypeStruct((3, 256), jnp.int32)
    score = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
    needed, of_diagonal = (
        flops.forward_flops(dataclasses.replace(run.model, window=window), 256, 3) for window in (None, 1)
    )
    of_pair = (needed - of_diagonal) / (flops.num_pairs(256, None) - 256)
    forward = needed + of_pair * (256**2 - flops.num_pairs(256, None))  # dense computes all pairs
    assert forward < score.lower(params, tokens).cost_analysis()["flops"] < forward * (1 + allowed)

    training = Training.of(run, make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1]))
    state, step = abstract_state(training), make_train_step(training)
    counted = step.lower(state, {"inputs": tokens, "targets": tokens}).cost_analysis()["flops"]
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert 3 * forward < counted < 3 * forward * (1 + allowed) + 40 * num_params  # the optimizer, a few for each


def test_a_step_is_three_forward_passes_and_tokens_share_it():
    run = make_run(model__window=8)
    forward = flops.forward_flops(run.model, 64, 4)
    assert flops.model_flops(run.model, 64, 4) == flops.model_flops_per_token(run.model, 64, 4) * 64 * 4 == 3 * forward
    layers = {"model__alternate_layers": (0,), "model__window": None, "model__alternate_window": 8}
    mixed, full = make_run(**layers).model, make_run(model__window=None).model
    half, whole = flops.forward_flops(mixed, 64, 4), flops.forward_flops(full, 64, 4)  # of two layers
    assert 2 * half == forward + whole
    assert forward < half < whole
    assert flops.forward_flops(run.model, 64, 8) < 2 * forward  # the bias is convolved once for a batch


def test_mfu_is_the_fraction_of_the_chips_peak():
    for chip in CHIPS:
        for kind in chip.device_kinds:
            assert chip_of(kind) is chip
            assert mfu(2 * chip.peak_flops, kind, 8) == 0.25
    assert mfu(1e12, jax.devices()[0].device_kind, 1) is None


# ---- plans

HELD = {"arguments": 1 << 29, "temporary": 1 << 29, "other results": 0, "program": 1 << 20}
COMPILED = {"fits": True, "compile_seconds": 1.0, "peak_bytes": 1 << 30, "held_bytes": HELD}


def test_bad_input_is_refused_before_compiling(monkeypatch):
    slices = {"v5p-9": "one of v5p-8, v5p-16, ", "h100:0": "h100:NUMBER", "h100": "h100:NUMBER", "v5e-2": "v5e-1,"}
    for topology, words in {"v5e:3x3": "one of v5e:1x1, v5e:2x2", "x200:8": "with CHIP one of", **slices}.items():
        with pytest.raises(InputError, match=words):
            read_topology(topology)
    hardware = read_topology("v5e:4x4")
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compiling.sys, "prefix", "/nowhere")
    with pytest.raises(InputError, match="--target=tpu-aot libtpu"):
        compiling.find_libtpu()
    monkeypatch.setenv("TPU_LIBRARY_PATH", __file__)
    for changes, mesh, field in (
        ({"train__batch_size": 16}, "fsdp=4", "must multiply to 16 devices"),
        ({"train__batch_size": 8}, "fsdp=16", r"train\.batch_size"),
        ({"train__batch_size": 3, "train__train_length": 17}, None, r"train\.batch_size"),
    ):
        with pytest.raises(InputError, match=field):
            planning.plan_run(make_run(**changes), hardware, None if mesh is None else read_mesh("--mesh", mesh))
    with pytest.raises(InputError, match="--utilisation = "):
        Settings(topology="v5e:2x2", utilisation=0.0)


def test_slices_have_names_of_the_cloud():
    """Of v4 and v5p the cloud counts cores, two in a chip, of others chips; each slice has one name."""
    names = {"v5litepod-8": "v5e:2x4", "v5e-256": "v5e:16x16", "v5p-8": "v5p:2x2x1", "v4-32": "v4:2x2x4"}
    for name, shape in names.items():
        assert read_topology(name) == read_topology(shape)
    for cloud_name, (chip, cores) in CLOUD_NAMES.items():
        for shape in TOPOLOGIES[chip]:
            hardware = read_topology(f"{chip}:{shape}")
            assert read_topology(f"{cloud_name}-{cores * hardware.num_chips}") == hardware
    gpus = read_topology("a100:24")
    assert (gpus.num_chips, gpus.platform, gpus.chip.name) == (24, "gpu", "a100")
    assert gpus.memory_bytes == 0.75 * gpus.chip.hbm_bytes


@pytest.mark.parametrize(
    ("batch_size", "length", "topology", "axes"),
    [
        (8, 16, "v5e:2x4", ["data=8", "fsdp=8", "fsdp=4,context=2", "fsdp=4,tensor=2"]),
        (8, 512, "v5e:8x8", ["fsdp=8,context=8"]),
    ],
)
def test_candidate_meshes_divide(batch_size, length, topology, axes):
    run = make_run(train__batch_size=batch_size, train__train_length=length, model__width=64, model__vocab_size=256)
    hardware = read_topology(topology)
    found = planning.candidates(run, hardware)
    assert [mesh.asked() for mesh in found] == axes
    for mesh in found:
        run.check_mesh(mesh.abstract(hardware.num_chips))


def test_a_plan_follows_from_the_compiled_program():
    mesh, hardware = read_mesh("--mesh", "fsdp=4,tensor=2"), read_topology("v5e:2x4")
    run = dataclasses.replace(make_run(model__width=64, model__vocab_size=256), mesh=mesh)
    plan = planning.measured(planning.Plan(run, hardware), COMPILED)
    _, params = model_structure(run.model)
    on_chip = plan.held_bytes["parameters"]
    total = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert total / 8 < on_chip < total / 2  # some are replicated on every chip
    assert 2 * on_chip <= plan.held_bytes["moments"] < 2 * on_chip + 16  # and the optimizer's two counters
    assert on_chip + plan.held_bytes["moments"] + plan.held_bytes["batch and padding"] == 1 << 29
    needed = flops.model_flops(run.model, 16, 8)
    assert plan.figures()["model_flops"] == needed
    cost = plan.costs(0.4)
    assert (cost["steps"], cost["tokens"], cost["flops"]) == (6, 6 * 8 * 16, 6 * needed)
    np.testing.assert_allclose(cost["hours"], 6 * needed / (8 * 197e12 * 0.4) / 3600)
    assert cost["chip_hours"] == 8 * cost["hours"]
    assert plan.costs(0.2)["hours"] == 2 * cost["hours"]


COMPILED_GIB = {"none": 10.47, "dots": 5.29, "full": 1.97}  # of libtpu 0.0.51, for 350m on v5e:4x4


def test_the_formula_of_memory_is_near_what_compilers_say():
    """Compare with steps on an H100, and with plans of a TPU slice for each remat policy."""
    steps = map(json.loads, (ROOT / "results" / "gpu" / "h100_steps" / "results.jsonl").read_text().splitlines())
    needed = {line["case"].rpartition("/")[2]: line["needed_gib"] for line in steps if "min_ms" in line}
    for name, gib in needed.items():
        spec = read_config(f"configs/paper.py:125m,{METHOD}", ["--config.train.batch_size=32"])
        if name == "blockwise":
            spec["model"]["attention"] = choose("attention", name, block_size=128, num_buckets=4)
        plan = planning.Plan(planning.run_to_plan(spec), read_topology("h100:1"))
        assert 0.9 <= planning.estimate(plan)["peak_bytes"] / (gib * GIB) <= 1.1, name
    for remat, gib in COMPILED_GIB.items():
        run = planning.run_to_plan(read_config(f"configs/paper.py:350m,{METHOD}", [f"--config.model.remat={remat}"]))
        plan = planning.Plan(run, read_topology("v5e:4x4"))
        assert 0.9 <= planning.estimate(plan)["peak_bytes"] / (gib * GIB) <= 1.25, remat


@pytest.mark.parametrize(("argument", "topology"), [("125m", "h100:8"), ("2.7b,train_length=4096", "b200:1")])
def test_the_largest_batch_fits_and_its_double_does_not(argument, topology):
    hardware = read_topology(topology)
    run = planning.run_to_plan(read_config(f"configs/paper.py:{argument},{METHOD}"))
    plans = planning.plan_run(run, hardware)
    batch_size, chosen = planning.largest_batch(plans), planning.best(plans) or plans[-1]
    for size, fits in ((batch_size, True), (2 * batch_size, False)):
        changed = planning.changed(run, chosen.run.mesh, chosen.run.model.remat, batch_size=size)
        (plan,) = planning.plan_run(changed, hardware, changed.mesh)
        assert plan.fits == fits


def test_the_printed_command_trains_what_was_planned():
    given = ["--config=configs/paper.py:6.7b,bias=kerple", "--config.train.batch_size=512"]
    spec, hardware = read_config(given[0].removeprefix("--config="), given[1:]), read_topology("v6e-64")
    run = planning.run_to_plan(spec)
    for plan in planning.plan_run(run, hardware, by_formula=True):
        program, *trained_by = shlex.split(planning.train_command(run, plan, given))
        assert [program, *trained_by[:2]] == ["dape-train", *given]
        assert "--config.data.path=stdlib" in trained_by  # the recipe needs a text
        trained = planning.run_to_plan(read_config(given[0].removeprefix("--config="), trained_by[1:]))
        assert trained == plan.run


@pytest.mark.extra
def test_a_run_is_planned_for_the_devices_of_this_process(tmp_path, capsys):
    planning.print_attached(tiny.spec(tmp_path), ["--config=mine.py", "--workdir=runs/a"])
    printed = capsys.readouterr().out
    for words in ("# 8 x cpu: ", r"\| fsdp=8 \| none \| yes \|", r"memory +compiled, in GiB a chip: \d\S+ param"):
        assert re.search(words, printed)
    assert printed.splitlines()[-1] == "train          dape-train --config=mine.py --workdir=runs/a"


def test_remat_increases_until_it_fits_and_the_report_has_every_try(monkeypatch, tmp_path):
    def compiled(_, plan, libtpu):
        does_fit = plan.run.model.remat != "none"
        return COMPILED if does_fit else {"fits": False, "reason": "too large"}

    monkeypatch.setenv("TPU_LIBRARY_PATH", __file__)
    monkeypatch.setattr(planning, "in_process", compiled)
    run, hardware = make_run(), read_topology("v5e:2x2")
    plans = planning.plan_run(run, hardware)
    meshes = [mesh.asked() for mesh in planning.candidates(run, hardware)]
    tried = [(plan.run.mesh.asked(), plan.run.model.remat, plan.fits) for plan in plans]
    assert tried == [(mesh, remat, remat == "dots") for mesh in meshes for remat in ("none", "dots")]
    text = planning.to_markdown(run, plans, 0.4, ["--config=mine.py"])
    assert (text.count("no: too large"), text.count("**best**")) == (len(meshes), 1)
    planning.save(tmp_path, run, plans, 0.4)
    record = json.loads((tmp_path / "plan.json").read_text())
    assert (record["costs"]["utilisation"], len(record["plans"])) == (0.4, len(plans))
    assert record["best"] == 1  # of equal plans the first, which sends least


# ---- the real compiler

METHOD = "bias=kerple,processor=dape,kernel=3"
PEAKS = {  # peak bytes of the plans in docs/planning.md: argument of configs/paper.py, slice, mesh
    ("125m", "v5e:2x2", "fsdp=4"): 3_679_266_304,
    ("125m,train_length=8192", "v5e:2x2", "fsdp=4"): 1_727_296_000,
    ("350m", "v5e:4x4", "fsdp=16"): 2_113_823_744,
    ("6.7b,train_length=4096", "v5e:16x16", "fsdp=64,context=4"): 3_187_483_136,
}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", PEAKS)
def test_plans_of_the_documentation(case, libtpu, tmp_path):
    argument, topology, mesh = case
    flags = [f"--config=configs/paper.py:{argument},{METHOD}", f"--topology={topology}", f"--mesh={mesh}"]
    flags += [f"--config.train.batch_size={4 if '8192' in argument else 64}"] if "train_length" in argument else []
    done = run_python("-m", "dape_jax.planning", *flags, f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "**best**" in done.stdout
    (plan,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    np.testing.assert_allclose(plan["peak_bytes"], PEAKS[case], rtol=0.01)


@pytest.mark.slow
def test_libtpu_knows_the_slices_of_the_table(libtpu):
    code = """
from dape_jax.hardware import TOPOLOGIES, chip_of, read_topology
from dape_jax.planning.compile import slice_devices
for name in [f"{chip}:{shape}" for chip, shapes in TOPOLOGIES.items() for shape in shapes]:
    hardware, devices = read_topology(name), slice_devices(read_topology(name))
    assert (len(devices), chip_of(devices[0].device_kind)) == (hardware.num_chips, hardware.chip), name
"""
    env = {"TPU_LIBRARY_PATH": str(libtpu), "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = run_python("-c", code, **env)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_step_is_compiled_for_a_slice_without_having_it(libtpu):
    """Compile with accumulation, whose sums over chips are in a loop, on which the compiler has failed."""
    changes = {"model__width": 256, "model__num_heads": 4, "model__dtype": "bfloat16", "model__vocab_size": 512}
    changes |= {"train__train_length": 64, "train__batch_size": 8, "model__num_layers": 3, "model__remat": "full"}
    hardware, mesh = read_topology("v5e:2x2"), read_mesh("--mesh", "fsdp=4")
    (plan,) = planning.plan_run(make_run(train__accumulation_steps=2, **changes), hardware, mesh)
    assert plan.fits
    assert plan.peak_bytes > plan.held_bytes["parameters"] + plan.held_bytes["moments"]
    too_much = {"train__batch_size": 1 << 16, "train__logits_chunk_tokens": 1 << 30}
    (plan,) = planning.plan_run(make_run(**changes | too_much), hardware, mesh)
    assert not plan.fits
    assert "exceeds available HBM" in plan.reason
