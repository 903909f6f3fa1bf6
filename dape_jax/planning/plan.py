"""Plan a run without its hardware: `python -m dape_jax.planning --config=configs/paper.py:6.7b --topology=v5e:16x16`.

In: a config and the name of a TPU slice. Out: for each mesh that is tried a `Plan`: whether the real train step fits,
what holds its memory, what its chips compute and send, and the least time that a step can take.

The step is compiled ahead of time by libtpu, the TPUs' own compiler, which needs no TPU. What is reported is read from
the program that would run (`hlo.py`), except for GPUs, which are planned by formula. One compilation at a time: see
`slices.py`.
"""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.stages import Wrapped
from ml_collections import config_flags
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.config import RunConfig, is_algorithmic, resolved
from dape_jax.data.corpus import STDLIB
from dape_jax.errors import InputError, require
from dape_jax.evaluation.programs import batch_size_at, model_at
from dape_jax.hardware import Slice, find_libtpu, in_process, libtpu_version, read_topology, why_not
from dape_jax.model.attention import Blockwise
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import attention_of, model_structure
from dape_jax.planning.flops import GIB, Chip, executed_flops, forward_flops, model_flops
from dape_jax.planning.hlo import read_work
from dape_jax.provenance import provenance
from dape_jax.sharding import AXES, BATCH_AXES, MeshConfig, activation_spec, make_mesh, read_mesh
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import TrainState, abstract_state, make_nll_step, make_train_step, shardings_of

REMATS = ("none", "dots", "full")  # the one that computes least again first


def read_run(spec: dict[str, Any], batch_size: int | None) -> RunConfig:
    """A run as it would be on the hardware: "auto" is bfloat16, and no text is needed."""
    spec = json.loads(json.dumps(spec))
    if spec["model"]["dtype"] == "auto":
        spec["model"]["dtype"] = "bfloat16"
    if not is_algorithmic(spec) and not spec["data"]["path"]:
        spec["data"]["path"] = STDLIB
    if batch_size is not None:
        spec["train"]["batch_size"] = batch_size
    return RunConfig.from_dict(spec)


def candidates(run: RunConfig, hardware: Slice) -> list[MeshConfig]:
    """A few meshes worth trying: copies, if the state is small; shards; shards beside parts of the text, or tensors.

    Raises:
        InputError: none of them divides batch, text and model.
    """
    n = hardware.num_chips

    def divides(mesh: MeshConfig) -> bool:
        try:
            run.check_mesh(planned_mesh(mesh, n))
        except InputError:
            return False
        return True

    def of_axis(axis: str, most: int) -> list[MeshConfig]:
        parts = [2**i for i in range(1, n.bit_length()) if n % 2**i == 0]
        meshes = [MeshConfig(**(dict.fromkeys(AXES, 1) | {"fsdp": n // part, axis: part})) for part in parts]
        return [mesh for mesh in meshes if divides(mesh)][:most]

    copies, shards = (MeshConfig(**(dict.fromkeys(AXES, 1) | {axis: n})) for axis in BATCH_AXES)
    _, params = model_structure(run.model)
    is_small = 16 * sum(leaf.size for leaf in jax.tree.leaves(params)) < hardware.chip.hbm_bytes / 8
    whole = [mesh for mesh in ([copies] if is_small and n > 1 else []) + [shards] if divides(mesh)]
    found = whole + of_axis("context", 1 if whole else 3) + of_axis("tensor", 1)
    if not found:
        run.check_mesh(planned_mesh(shards, n))  # says what does not divide
    return found


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """A device that is only counted."""

    id: int
    process_index: int = 0
    platform: str = "planned"
    device_kind: str = "planned"


def planned_mesh(mesh: MeshConfig, num_chips: int) -> Mesh:
    """The mesh of a run's shapes and shardings, of no devices in particular.

    Raises:
        InputError: the sizes do not multiply to the chips.
    """
    sizes = mesh.sizes(num_chips)
    devices = np.array([PlannedDevice(i) for i in range(num_chips)])
    return Mesh(devices.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclasses.dataclass(frozen=True)
class Request:
    """What one compilation is asked for; it travels to a process of its own.

    Args:
        run: the run.
        hardware: to compile for.
        mesh: of its chips.
        eval_length: compile the evaluator at this length, and not the train step.
    """

    run: RunConfig
    hardware: Slice
    mesh: MeshConfig
    eval_length: int | None = None

    @property
    def program(self) -> str:
        """What is compiled."""
        return "train step" if self.eval_length is None else f"evaluation at {self.eval_length}"


def compile_program(request: Request) -> dict[str, Any]:
    """Compile a program for a slice and read what it does; in a process of its own, see `in_process`."""
    hardware = request.hardware
    # By default libtpu takes the two cores of a v4 chip for two devices; the cloud's runtime does not.
    options = {"chip_config_name": "megacore"} if hardware.chip.name == "v4" else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=hardware.name, **options).devices
    mesh = make_mesh(request.mesh, devices)
    started = time.monotonic()
    step, arguments = _step(request, mesh)
    with jax.set_mesh(mesh):
        lowered = step.lower(*arguments)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            return {"fits": False, "reason": why_not(str(error)), "compile_seconds": time.monotonic() - started}
    stats = compiled.memory_analysis()
    assert stats is not None
    held = {"arguments": stats.argument_size_in_bytes, "temporary": stats.temp_size_in_bytes}
    held |= {"results beside them": stats.output_size_in_bytes - stats.alias_size_in_bytes}
    held |= {"program": stats.generated_code_size_in_bytes}
    try:
        work = dataclasses.asdict(read_work(compiled.as_text() or ""))
    except jax.errors.JaxRuntimeError:  # libtpu 0.0.51 cannot print some programs with a kernel, for v5p and v6e
        work = None
    return {
        "fits": True,
        "compile_seconds": time.monotonic() - started,
        "peak_bytes": stats.peak_memory_in_bytes,
        "held_bytes": held,
        "work": work,
    }


def _step(request: Request, mesh: Mesh) -> tuple[Wrapped, tuple[Any, dict[str, Any]]]:
    """The jitted step, and what it is called with: shapes, dtypes and places."""
    run, length = request.run, request.eval_length
    optimizer = make_optimizer(run.optimizer, run.train.num_steps)
    state = abstract_state(run.model, optimizer, mesh)

    def batch(batch_size: int, length: int) -> dict[str, Any]:
        place = NamedSharding(mesh, activation_spec("BT"))
        rows = jax.ShapeDtypeStruct((batch_size, length), np.int32, sharding=place)
        return dict.fromkeys(("inputs", "targets"), rows)

    if length is None:
        graphdef, _ = model_structure(run.model)
        step = make_train_step(
            graphdef,
            optimizer,
            shardings_of(state),
            accumulation_steps=run.train.accumulation_steps,
            logits_chunk_tokens=run.train.logits_chunk_tokens,
            spike_nats=run.train.spike_nats,
        )
        return step, (state, batch(run.train.batch_size, run.train.train_length))
    evaluation = run.evaluation
    graphdef, _ = model_structure(model_at(run.model, length, evaluation, "rope", run.train.train_length))
    batch_size = batch_size_at(length, evaluation.max_windows, evaluation, mesh)
    return make_nll_step(graphdef, min(evaluation.last_tokens, length)), (state.params, batch(batch_size, length))


# ---- what a plan says


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of one program on one mesh; all figures are for one chip, unless they say otherwise.

    Args:
        program: train step, or evaluation at a length.
        mesh: as a flag gives it.
        remat: what the backward pass keeps of a block.
        batch_size: sequences, over all chips.
        length: of each, in tokens.
        by_formula: whether the figures are estimates by formula, and not read from a compiled program.
        fits: compiles, into the chips' memory.
        reason: why it does not, in the compiler's words.
        compile_seconds: that the compiler took here.
        peak_bytes: the most memory that is held at once.
        held_bytes: by what: parameters, moments, batch, temporary (activations, gradients, gathered weights), program.
        largest: the largest buffers made: (bytes, shape, operation of the model).
        model_flops: that the model needs, over all chips, by part.
        executed_flops: of the program by formula: with recomputation, masked pairs, and what every chip does itself.
        matmul_flops: of the compiled program's matmuls and convolutions.
        collectives: kind, how many, and the bytes that a chip receives.
        loops: how often the body of each of the program's loops runs.
        num_full_rematerializations: times that the compiler said it gathers a whole array to shard it anew.
        roofline_seconds: least time by limit: compute, memory, interconnect.
        binds: the limit with the largest.
        step_seconds: that time.
        mfu: model FLOPs utilisation at that time: the most that can be reached.
        mfu_at_step_time: at the time that was given.
    """

    program: str
    mesh: str
    remat: str
    batch_size: int
    length: int
    by_formula: bool
    fits: bool
    reason: str | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    held_bytes: dict[str, int] | None = None
    largest: tuple[tuple[int, str, str], ...] = ()
    model_flops: dict[str, int] | None = None
    executed_flops: int | None = None
    matmul_flops: int | None = None
    collectives: tuple[dict[str, Any], ...] = ()
    loops: tuple[int, ...] = ()
    num_full_rematerializations: int = 0
    roofline_seconds: dict[str, float] | None = None
    binds: str | None = None
    step_seconds: float | None = None
    mfu: float | None = None
    mfu_at_step_time: float | None = None


def make_plan(request: Request, libtpu: Path | None, step_time: float | None) -> Plan:
    """Compile, or estimate, and add what follows from it.

    Args:
        request: what is planned.
        libtpu: the compiler; None for GPUs.
        step_time: seconds that a step is seen to take, for its MFU.
    """
    run, hardware = request.run, request.hardware
    mesh = planned_mesh(request.mesh, hardware.num_chips)
    length, batch_size = run.train.train_length, run.train.batch_size
    if request.eval_length is not None:
        length = request.eval_length
        batch_size = batch_size_at(length, run.evaluation.max_windows, run.evaluation, mesh)
    plan = Plan(
        program=request.program,
        mesh=request.mesh.asked(),
        remat=run.model.remat,
        batch_size=batch_size,
        length=length,
        by_formula=not hardware.is_tpu,
        fits=False,
    )
    needed = (model_flops if request.eval_length is None else forward_flops)(run.model, length, batch_size)
    by_formula = executed_of(run, mesh, hardware) if request.eval_length is None else needed.total
    by_formula //= hardware.num_chips
    if libtpu is None:
        outcome = estimate(run, hardware, mesh)
    else:
        outcome = in_process(compile_program, request, libtpu)
        if not outcome["fits"]:
            return dataclasses.replace(plan, **outcome)
        work = outcome.pop("work")
        if work is None:
            work = {"largest": (), "matmul_flops": by_formula, "collectives": (), "loops": (), "hbm_bytes": 0}
            outcome["reason"] = "the compiler cannot print it: FLOPs by formula; traffic and collectives are not known"
        outcome |= {name: work[name] for name in ("largest", "matmul_flops", "collectives", "loops")}
        held = outcome["held_bytes"]
        arguments, state = held.pop("arguments"), state_bytes(run, mesh)
        if request.eval_length is not None:
            state = {"parameters": state["parameters"]}
        outcome["held_bytes"] = state | {"batch and padding": arguments - sum(state.values())} | held
        outcome["roofline_seconds"] = roofline(
            hardware.chip,
            work["matmul_flops"],
            work["hbm_bytes"],
            sum(collective["num_bytes"] for collective in work["collectives"]),
        )
    if request.eval_length is None:
        outcome["executed_flops"] = by_formula
    times = outcome["roofline_seconds"]
    binds = max(times, key=lambda name: times[name])
    peak = needed.total / (hardware.num_chips * hardware.chip.peak_flops)
    outcome |= {"binds": binds, "step_seconds": times[binds], "mfu": peak / times[binds]}
    if step_time is not None and request.eval_length is None:
        outcome["mfu_at_step_time"] = peak / step_time
    return dataclasses.replace(plan, model_flops=dataclasses.asdict(needed), **outcome)


def roofline(chip: Chip, flops: int, hbm_bytes: int, link_bytes: int) -> dict[str, float]:
    """Least time by each limit, if nothing else took any."""
    return {
        "compute": flops / chip.peak_flops,
        "memory": hbm_bytes / chip.hbm_bytes_per_second,
        "interconnect": link_bytes / chip.link_bytes_per_second,
    }


def executed_of(run: RunConfig, mesh: Mesh, hardware: Slice) -> int:
    """`executed_flops` of a run's train step, over all chips."""
    sizes, train = dict(mesh.shape), run.train
    batch_parts, tokens = math.prod(sizes[axis] for axis in BATCH_AXES), train.batch_size * train.train_length
    tokens_at_once = tokens // (batch_parts * sizes["context"] * train.accumulation_steps)
    row_parts = sizes["context"] * sizes["tensor"]
    attention = attention_of(run.model, train.train_length, hardware.platform, hardware.chip.device_kinds[0], row_parts)
    return executed_flops(
        dataclasses.replace(run.model, attention=attention),
        train.train_length,
        train.batch_size,
        row_parts=row_parts,
        batch_parts=batch_parts,
        accumulation_steps=train.accumulation_steps,
        chunked_unembedding=tokens_at_once > train.logits_chunk_tokens,
    ).total


def state_bytes(run: RunConfig, mesh: Mesh) -> dict[str, int]:
    """What the parameters and the optimizer's moments take on each chip, exactly."""
    state: TrainState = abstract_state(run.model, make_optimizer(run.optimizer, run.train.num_steps), mesh)

    def on_a_chip(tree: Any) -> int:
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
        )

    return {"parameters": on_a_chip(state.params), "moments": on_a_chip(state.opt_state)}


def estimate(run: RunConfig, hardware: Slice, mesh: Mesh) -> dict[str, Any]:
    """What a train step takes on GPUs, by formula. The state is exact; the rest is

        gradients       as many bytes as parameters
        layer inputs    tokens x D x 4 for each layer, float32
        kept of layers  remat "none" and "dots": results of matmuls with weights, 2 bytes each ("none": twice as many,
                        for what is between them); and, with dense attention and remat "none", scores, probabilities
                        and both sides of the convolutions, 4 bytes each
        one layer       its weights gathered, twice, in 2 bytes, and the scores and so on of one block of rows
        logits          tokens at once x V x 8: float32, and their gradient

    with the tokens of one chip in one accumulation part. Interconnect: the weights gathered twice (thrice if remat is
    not "none") and their gradients scattered, 2 bytes each. Memory traffic: of the state alone, a lower bound.
    """
    model, sizes, train = run.model, dict(mesh.shape), run.train
    state = state_bytes(run, mesh)
    rows = train.batch_size // (math.prod(sizes[axis] for axis in BATCH_AXES) * train.accumulation_steps)
    tokens = rows * train.train_length // sizes["context"]
    D, H, L = model.width, model.num_heads, model.num_layers
    _, params = model_structure(model)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params)) // sizes["tensor"]

    channels = model.processor.channels if isinstance(model.processor, DapeConfig) else 0
    num_rows = train.train_length // (sizes["context"] * sizes["tensor"])
    attention = attention_of(model, train.train_length, "gpu", row_stride=sizes["context"] * sizes["tensor"])
    block = attention.block_size if isinstance(attention, Blockwise) else num_rows
    of_scores = rows * train.train_length * 4 * (3 * H + 2 * channels)
    kept = 0
    if model.remat != "full":
        of_weights = tokens * 2 * (2 * D + 2 * model.num_kv_heads * model.head_dim + 5 * D)
        kept = of_weights * (2 if model.remat == "none" else 1)
        if model.remat == "none" and block >= num_rows:
            kept += of_scores * num_rows
    held = state | {
        "gradients": state["parameters"],
        "layer inputs": L * tokens * D * 4,
        "kept of layers": L * kept,
        "one layer": 2 * 2 * 12 * D * D // sizes["tensor"] + of_scores * min(block, num_rows),
        "logits": min(tokens, train.logits_chunk_tokens) * model.num_outputs * 8 // sizes["tensor"],
    }
    peak, shards = sum(held.values()), sizes["fsdp"]
    received = num_params * 2 * (3 if model.remat == "none" else 4) * train.accumulation_steps * (shards - 1) // shards
    if sizes["data"] > 1:
        received += 2 * 4 * num_params // shards * (sizes["data"] - 1) // sizes["data"]
    return {
        "fits": peak < hardware.chip.hbm_bytes,
        "reason": None if peak < hardware.chip.hbm_bytes else f"by formula, {peak / GIB:.1f} GiB are needed",
        "peak_bytes": peak,
        "held_bytes": held,
        "roofline_seconds": roofline(
            hardware.chip,
            executed_of(run, mesh, hardware) // hardware.num_chips,
            2 * (state["parameters"] + state["moments"]) + 3 * state["parameters"],
            received,
        ),
    }


def plan_run(
    run: RunConfig,
    hardware: Slice,
    mesh: MeshConfig | None = None,
    eval_length: int | None = None,
    step_time: float | None = None,
) -> list[Plan]:
    """Plan a run on a slice: on the mesh given as the config has it; or on a few meshes, each with remat policies.

    Without a mesh each of `candidates` is tried with remat "none", then "dots", then "full", until one fits: the first
    that does computes least again. The evaluator, if asked for, is compiled on the mesh of the best.

    Raises:
        InputError: what does not divide or exist, before anything is compiled.
    """
    if mesh is None:
        meshes, remats = candidates(run, hardware), REMATS
    else:
        run.check_mesh(planned_mesh(mesh, hardware.num_chips))
        meshes, remats = [mesh], (run.model.remat,)
    libtpu = find_libtpu() if hardware.is_tpu else None
    plans: list[Plan] = []
    with tqdm(total=len(meshes) + (eval_length is not None), unit="mesh", desc=hardware.name) as bar:

        def add(request: Request) -> Plan:
            bar.set_postfix_str(f"{request.mesh.asked()} remat={request.run.model.remat} {request.program}")
            plan = make_plan(request, libtpu, step_time)
            plans.append(plan)
            bar.write(f"{hardware.name} {line_of(plan)}", file=sys.stderr)
            return plan

        for each in meshes:
            for remat in remats:
                remade = dataclasses.replace(run, model=dataclasses.replace(run.model, remat=remat))
                if add(Request(remade, hardware, each)).fits:
                    break
            bar.update()
        if eval_length is not None:
            chosen = best(plans)
            add(Request(run, hardware, read_mesh("mesh", chosen.mesh) if chosen else meshes[0], eval_length))
            bar.update()
    return plans


def best(plans: list[Plan]) -> Plan | None:
    """Of the train steps that fit, the one with the least roofline time; None if none fits."""
    fitting = [plan for plan in plans if plan.fits and plan.program == "train step"]
    return min(fitting, key=lambda plan: plan.step_seconds or math.inf, default=None)


def line_of(plan: Plan) -> str:
    """A plan in one line."""
    text = f"{plan.mesh} remat={plan.remat}, {plan.program}, {plan.batch_size} x {plan.length}: "
    if not plan.fits:
        return text + f"no: {plan.reason}"
    peak_bytes, step_seconds = plan.peak_bytes or 0, plan.step_seconds or 0.0
    text += f"fits, {peak_bytes / GIB:.2f} GiB a chip; at least {step_seconds * 1e3:.1f} ms"
    return text + f" ({plan.binds} binds), MFU at most {plan.mfu:.0%}"


def report(run: RunConfig, hardware: Slice, plans: list[Plan]) -> str:
    """What was found, as Markdown: a line for each plan, and all that is known of the best."""
    chip, chosen = hardware.chip, best(plans)
    how = "compiled ahead of time" if hardware.is_tpu else "BY FORMULA: an estimate, nothing was compiled"
    lines = [
        f"# {hardware.name}: {hardware.num_chips} chips, {how}",
        "",
        f"A chip: {chip.peak_flops / 1e12:g} TFLOP/s in bfloat16, {chip.hbm_bytes / GIB:.1f} GiB at "
        f"{chip.hbm_bytes_per_second / 1e9:g} GB/s, {chip.link_bytes_per_second / 1e9:g} GB/s from its neighbours "
        f"({chip.source}).",
        f"Model: {run.model.num_layers} layers, width {run.model.width}, {run.model.num_heads} heads, bias "
        f"{type(run.model.bias).__name__.removesuffix('Config')}, processor "
        f"{type(run.model.processor).__name__.removesuffix('Config')}, {run.model.dtype}.",
        "",
        "| program | mesh | remat | fits | GiB a chip | compute ms | memory ms | interconnect ms | MFU at most |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for plan in plans:
        cells = [plan.program, plan.mesh, plan.remat, "yes" if plan.fits else f"no: {plan.reason}"]
        if plan.fits and plan.roofline_seconds and plan.peak_bytes:
            times = [f"{seconds * 1e3:.1f}" for seconds in plan.roofline_seconds.values()]
            cells += [f"{plan.peak_bytes / GIB:.2f}", *times, f"{plan.mfu:.0%}"]
        else:
            cells += [""] * 5
        lines.append(f"| {' | '.join(cells)} |" + (" **best**" if plan is chosen else ""))
    for plan in [chosen] if chosen else []:
        lines += ["", *details(plan, hardware)]
    if not chosen:
        lines += ["", "Nothing that was tried fits."]
    return "\n".join(lines) + "\n"


def details(plan: Plan, hardware: Slice) -> list[str]:
    """All that is known of a plan that fits."""
    assert plan.peak_bytes
    assert plan.held_bytes
    assert plan.model_flops
    total = sum(plan.model_flops.values())
    tokens = plan.batch_size * plan.length
    lines = [
        f"## Best: {plan.mesh}, remat {plan.remat}, batch {plan.batch_size} x {plan.length} tokens",
        "",
        f"Memory, at most {plan.peak_bytes / 2**20:,.0f} MiB a chip at once, in MiB:",
        "",
        *(f"    {size / 2**20:>12,.1f}  {name}" for name, size in plan.held_bytes.items()),
    ]
    if plan.largest:
        lines += ["", "Largest buffers that the program makes (not all at once), in MiB:", ""]
        lines += [f"    {size / 2**20:>12,.1f}  {shape}  {source}" for size, shape, source in plan.largest]
    lines += ["", f"FLOPs of the model, {total:.4g} a step, {total / tokens:.4g} a token:", ""]
    lines += [f"    {flops / total:>12.1%}  {name}" for name, flops in plan.model_flops.items()]
    lines += ["", "FLOPs of the program, a chip:", ""]
    lines += [f"    {total / hardware.num_chips:>12.4g}  needed by the model"]
    if plan.executed_flops is not None:
        lines += [f"    {plan.executed_flops:>12.4g}  executed, by formula"]
    if plan.matmul_flops is not None:
        lines += [f"    {plan.matmul_flops:>12.4g}  executed, in the compiled program's matmuls and convolutions"]
    if not plan.by_formula:
        lines += ["", "Collectives (bodies of loops as often as they run): how many, and GB that a chip receives:", ""]
        lines += [f"    {c['count']:>6}  {c['num_bytes'] / 1e9:>8.3f}  {c['kind']}" for c in plan.collectives]
        runs = ", ".join(str(n) if n else "unknown, counted once" for n in plan.loops)
        lines += [f"    loops run {runs} times"]
    if plan.num_full_rematerializations:
        lines += [f"    the compiler gathered whole arrays to shard them anew: {plan.num_full_rematerializations}"]
    if plan.mfu_at_step_time is not None:
        lines += ["", f"MFU at the step time given: {plan.mfu_at_step_time:.1%}"]
    return lines


def save(directory: Path, run: RunConfig, hardware: Slice, plans: list[Plan]) -> None:
    """Write plan.json and plan.md."""
    versions = provenance("jaxlib", "flax", "optax")
    if hardware.is_tpu:
        versions["versions"]["libtpu"] = libtpu_version(find_libtpu())
    record = {
        "topology": hardware.name,
        "num_chips": hardware.num_chips,
        "chip": dataclasses.asdict(hardware.chip),
        "best": (chosen := best(plans)) and plans.index(chosen),
        "plans": [dataclasses.asdict(plan) for plan in plans],
        "config": resolved(run),
        **{key: versions[key] for key in ("commit", "command", "versions")},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").write_text(json.dumps(record, indent=1) + "\n")
    (directory / "plan.md").write_text(report(run, hardware, plans))


CONFIG = config_flags.DEFINE_config_file("config", help_string="Config file, with its argument after a colon.")
TOPOLOGY = flags.DEFINE_string("topology", None, "Slice: v4|v5e|v5p|v6e:SHAPE, as v5e:16x16, or h100|h200:N GPUs.")
MESH = flags.DEFINE_string("mesh", None, "Its mesh, fsdp=64,context=4; without it a few are tried.")
BATCH = flags.DEFINE_integer("batch", None, "Sequences in a step; train.batch_size of the config without it.")
EVAL_LENGTH = flags.DEFINE_integer("eval_length", None, "Compile the evaluator at this length as well.")
STEP_TIME = flags.DEFINE_float("step_time", None, "Seconds that a step takes: its MFU is said.")
OUTPUT = flags.DEFINE_string("output", None, "Directory for plan.json and plan.md.")


def main(_: list[str]) -> None:
    """Flags, then one call."""
    require(TOPOLOGY.value is not None, "--topology", TOPOLOGY.value, "a slice, as v5e:16x16")
    for flag in (BATCH, EVAL_LENGTH, STEP_TIME):
        require(flag.value is None or flag.value > 0, f"--{flag.name}", flag.value, "a positive number")
    require(OUTPUT.value != "", "--output", OUTPUT.value, "a directory")
    hardware = read_topology(TOPOLOGY.value or "")
    require(
        hardware.is_tpu or EVAL_LENGTH.value is None, "--eval_length", EVAL_LENGTH.value, "TPUs alone: it is compiled"
    )
    jax.config.update("jax_platforms", "cpu")  # nothing runs here
    run = read_run(command_line.config_of(CONFIG), BATCH.value)
    mesh = None if MESH.value is None else read_mesh("--mesh", MESH.value)
    plans = plan_run(run, hardware, mesh, EVAL_LENGTH.value, STEP_TIME.value)
    print(report(run, hardware, plans), end="")
    if OUTPUT.value:
        save(Path(OUTPUT.value), run, hardware, plans)
