"""Plan a run without its hardware: memory on a TPU slice, and a lower bound of the step time.

In: a run's config and a slice. Out: a `Plan` for each mesh that is tried: whether the train step fits, its memory,
FLOPs and communication, and a lower bound of its time. Next: `__main__.py`, the command line.

libtpu compiles the step ahead of time (`compile.py`); the figures are read from the compiled program (`hlo.py`).
"""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from dape_jax.config import RunConfig, is_algorithmic, resolved
from dape_jax.data.corpus import STDLIB
from dape_jax.data.store import follow_corpus
from dape_jax.errors import InputError
from dape_jax.evaluation.programs import batch_size_at, model_at
from dape_jax.files import write_json
from dape_jax.hardware import GIB, MIB, Slice
from dape_jax.model.transformer import attention_of, model_structure, parameter_counts
from dape_jax.planning.compile import (
    compile_error,
    compile_program,
    find_libtpu,
    in_process,
    libtpu_version,
    slice_devices,
)
from dape_jax.planning.flops import executed_flops, forward_flops, model_flops
from dape_jax.progress import Progress
from dape_jax.provenance import provenance
from dape_jax.sharding import AXES, BATCH_AXES, MeshConfig, activation_spec, make_mesh, read_mesh
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import abstract_state, make_nll_step, make_train_step, shardings_of

REMATS = ("none", "dots", "full")  # in order of increasing recomputation


# ---- runs and meshes


def run_to_plan(spec: dict[str, Any], batch_size: int | None) -> RunConfig:
    """Return the run of a config as on a TPU: dtype "auto" is bfloat16, and no corpus is needed.

    `batch_size` replaces `train.batch_size`, unless it is None.
    """
    spec = json.loads(json.dumps(spec))
    if spec["model"]["dtype"] == "auto":
        spec["model"]["dtype"] = "bfloat16"
    if not is_algorithmic(spec) and not spec["data"]["path"]:
        spec["data"]["path"] = STDLIB
    if batch_size is not None:
        spec["train"]["batch_size"] = batch_size
    return RunConfig.from_dict(follow_corpus(spec))


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """Device of a mesh for which nothing is compiled."""

    id: int
    process_index: int = 0
    platform: str = "planned"
    device_kind: str = "planned"


def planned_mesh(mesh: MeshConfig, num_chips: int) -> Mesh:
    """Return a mesh for shapes and shardings only, without libtpu.

    Raises:
        InputError: the product of the sizes is not the number of chips.
    """
    sizes = mesh.sizes(num_chips)
    devices = np.array([PlannedDevice(i) for i in range(num_chips)])
    return Mesh(devices.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def candidates(run: RunConfig, hardware: Slice) -> list[MeshConfig]:
    """Return up to 4 meshes to try: data (if the state is small), fsdp, fsdp x context, fsdp x tensor.

    If the batch does not divide over data or fsdp alone, up to three sizes of context are tried.

    Raises:
        InputError: none of them divides batch, length and model.
    """
    n = hardware.num_chips

    def mesh_of(**sizes: int) -> MeshConfig:
        return MeshConfig(**(dict.fromkeys(AXES, 1) | sizes))

    def divides(mesh: MeshConfig) -> bool:
        try:
            run.check_mesh(planned_mesh(mesh, n))
        except InputError:
            return False
        return True

    def fsdp_and(axis: str, at_most: int) -> list[MeshConfig]:
        parts = [2**i for i in range(1, n.bit_length()) if n % 2**i == 0]
        meshes = [mesh_of(**{"fsdp": n // part, axis: part}) for part in parts]
        return [mesh for mesh in meshes if divides(mesh)][:at_most]

    num_params = parameter_counts(model_structure(run.model)[1])["total"]
    is_small = 16 * num_params < hardware.chip.hbm_bytes / 8  # float32 parameters, gradients and two moments
    batch_meshes = ([mesh_of(data=n)] if is_small and n > 1 else []) + [mesh_of(fsdp=n)]
    batch_meshes = [mesh for mesh in batch_meshes if divides(mesh)]
    found = batch_meshes + fsdp_and("context", 1 if batch_meshes else 3) + fsdp_and("tensor", 1)
    if not found:
        run.check_mesh(planned_mesh(mesh_of(fsdp=n), n))  # raises `InputError` with the field that is not divisible
    return found


# ---- compilation


@dataclasses.dataclass(frozen=True)
class Request:
    """Program to compile for a slice."""

    run: RunConfig
    hardware: Slice
    mesh: MeshConfig  # mesh of the chips
    eval_length: int | None = None  # compile the evaluator at this length; the train step if None

    @property
    def program(self) -> str:
        """Return the program's name in reports."""
        return "train step" if self.eval_length is None else f"evaluation at {self.eval_length}"

    def batch_shape(self, mesh: Mesh) -> tuple[int, int]:
        """Return the number of sequences in a batch, over all chips, and the number of tokens in a sequence."""
        if self.eval_length is None:
            return self.run.train.batch_size, self.run.train.train_length
        evaluation = self.run.evaluation
        return batch_size_at(self.eval_length, evaluation.max_windows, evaluation, mesh), self.eval_length


def compile_request(request: Request) -> dict[str, Any]:
    """Compile a program for a slice and return fields of its `Plan`; must run in a separate process."""
    mesh, run, length = make_mesh(request.mesh, slice_devices(request.hardware)), request.run, request.eval_length
    optimizer, evaluation = make_optimizer(run.optimizer, run.train.num_steps), run.evaluation
    state = abstract_state(run.model, optimizer, mesh, run.init.trained_kinds)
    rows = jax.ShapeDtypeStruct(
        request.batch_shape(mesh), np.int32, sharding=NamedSharding(mesh, activation_spec("BT"))
    )
    if length is None:
        graphdef, _ = model_structure(run.model)
        step = make_train_step(
            graphdef,
            optimizer,
            shardings_of(state),
            accumulation_steps=run.train.accumulation_steps,
            logits_chunk_tokens=run.train.logits_chunk_tokens,
            train_only=run.init.trained_kinds,
        )
    else:
        graphdef, _ = model_structure(model_at(run.model, length, evaluation, "rope", run.train.train_length))
        step = make_nll_step(graphdef, min(evaluation.last_tokens, length))
    state_or_params = state if length is None else state.params
    with jax.set_mesh(mesh):
        try:
            program = compile_program(step, state_or_params, {"inputs": rows, "targets": rows})
        except jax.errors.JaxRuntimeError as error:
            return {"fits": False, "reason": compile_error(error)}
    memory = program.memory
    return {
        "fits": True,
        "compile_seconds": program.compile_s,
        "peak_bytes": memory.peak_memory_in_bytes,
        "held_bytes": {
            "arguments": memory.argument_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "other results": program.result_bytes,
            "program": memory.generated_code_size_in_bytes,
        },
        "work": dataclasses.asdict(program.work),
    }


# ---- plans


@dataclasses.dataclass(frozen=True)
class Plan:
    """Figures of one program on one mesh; they are for one chip, unless stated otherwise."""

    program: str  # "train step", or evaluation at a length
    mesh: str  # in the notation of `--mesh`
    remat: str  # rematerialisation policy of the layers
    batch_size: int  # sequences, over all chips
    length: int  # tokens in a sequence
    fits: bool  # whether it compiles and fits in the chips' memory
    reason: str | None = None  # why it does not fit
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    # By purpose: parameters, moments, batch, temporary (activations, gradients, gathered weights), program.
    held_bytes: dict[str, int] | None = None
    largest: tuple[tuple[int, str, str], ...] = ()  # the largest buffers: (bytes, shape, operation of the model)
    model_flops: dict[str, int] | None = None  # FLOPs that the model needs, over all chips, by part
    executed_flops: int | None = None  # by formula: with recomputation, masked pairs and replicated computation
    matmul_flops: int | None = None  # FLOPs of the compiled program's matmuls and convolutions
    collectives: tuple[dict[str, Any], ...] = ()  # kind, count, and bytes that a chip receives
    loops: tuple[int, ...] = ()  # trip count of each loop of the program
    num_full_rematerializations: int = 0  # arrays gathered in full to reshard them, by the compiler's warnings
    roofline_seconds: dict[str, float] | None = None  # minimum time by resource: compute, memory, interconnect
    binds: str | None = None  # bottleneck: the resource with the largest time
    step_seconds: float | None = None  # time of the bottleneck, a lower bound
    mfu: float | None = None  # model FLOPs utilisation at that time, an upper bound
    mfu_at_step_time: float | None = None  # model FLOPs utilisation at the given step time


def make_plan(request: Request, libtpu: Path, step_time: float | None) -> Plan:
    """Compile a program and return its plan; `step_time` is the measured time of a train step, or None."""
    run, hardware, is_train = request.run, request.hardware, request.eval_length is None
    chip = hardware.chip
    mesh = planned_mesh(request.mesh, hardware.num_chips)
    batch_size, length = request.batch_shape(mesh)
    outcome = in_process(compile_request, request, libtpu)
    plan = Plan(request.program, request.mesh.asked(), run.model.remat, batch_size, length, fits=outcome["fits"])
    if not plan.fits:
        return dataclasses.replace(plan, **outcome)

    needed = (model_flops if is_train else forward_flops)(run.model, length, batch_size)
    executed = (executed_of(run, mesh, hardware) if is_train else needed.total) // hardware.num_chips
    state, held = state_bytes(run, mesh), outcome.pop("held_bytes")
    if not is_train:
        del state["moments"]
    outcome["held_bytes"] = state | {"batch and padding": held.pop("arguments") - sum(state.values())} | held
    work = outcome.pop("work")
    outcome |= {name: work[name] for name in ("largest", "matmul_flops", "collectives", "loops")}
    link_bytes = sum(collective["num_bytes"] for collective in work["collectives"])
    seconds = {  # minimum time by each resource
        "compute": work["matmul_flops"] / chip.peak_flops,
        "memory": work["hbm_bytes"] / chip.hbm_bytes_per_second,
        "interconnect": link_bytes / chip.link_bytes_per_second,
    }
    binds = max(seconds, key=lambda limit: seconds[limit])
    least_seconds = needed.total / (hardware.num_chips * chip.peak_flops)  # at an MFU of 1
    return dataclasses.replace(
        plan,
        model_flops=dataclasses.asdict(needed),
        executed_flops=executed if is_train else None,
        roofline_seconds=seconds,
        binds=binds,
        step_seconds=seconds[binds],
        mfu=least_seconds / seconds[binds],
        mfu_at_step_time=least_seconds / step_time if is_train and step_time is not None else None,
        **outcome,
    )


def executed_of(run: RunConfig, mesh: Mesh, hardware: Slice) -> int:
    """Return `executed_flops` of a run's train step, over all chips."""
    sizes, train = dict(mesh.shape), run.train
    batch_parts, row_parts = math.prod(sizes[axis] for axis in BATCH_AXES), sizes["context"] * sizes["tensor"]
    chunk_tokens = train.batch_size * train.train_length // (batch_parts * sizes["context"] * train.accumulation_steps)
    attention = attention_of(run.model, train.train_length, "tpu", hardware.chip.device_kinds[0], row_parts)
    return executed_flops(
        dataclasses.replace(run.model, attention=attention),
        train.train_length,
        train.batch_size,
        row_parts=row_parts,
        batch_parts=batch_parts,
        accumulation_steps=train.accumulation_steps,
        chunked_unembedding=chunk_tokens > train.logits_chunk_tokens,
    ).total


def state_bytes(run: RunConfig, mesh: Mesh) -> dict[str, int]:
    """Return the memory of the parameters and the optimizer's moments on each chip, exactly."""
    optimizer = make_optimizer(run.optimizer, run.train.num_steps)
    state = abstract_state(run.model, optimizer, mesh, run.init.trained_kinds)

    def bytes_on_chip(tree: Any) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    return {"parameters": bytes_on_chip(state.params), "moments": bytes_on_chip(state.opt_state)}


def plan_run(
    run: RunConfig,
    hardware: Slice,
    mesh: MeshConfig | None = None,
    eval_length: int | None = None,
    step_time: float | None = None,
) -> list[Plan]:
    """Plan a run on a slice.

    Args:
        run: the run.
        hardware: the slice.
        mesh: its mesh, with the config's remat. If None, try `candidates`, each with the `REMATS` until one fits.
        eval_length: also compile the evaluator at this length, on the best mesh.
        step_time: see `make_plan`.

    Raises:
        InputError: sizes are not divisible, or libtpu is missing; raised before anything is compiled.
    """
    if mesh is None:
        meshes, remats = candidates(run, hardware), REMATS
    else:
        run.check_mesh(planned_mesh(mesh, hardware.num_chips))
        meshes, remats = [mesh], (run.model.remat,)
    libtpu = find_libtpu()
    plans: list[Plan] = []
    with Progress(total=len(meshes) + (eval_length is not None), unit="mesh", desc=hardware.name) as bar:

        def add(request: Request) -> Plan:
            bar.set_postfix_str(f"{request.mesh.asked()} remat={request.run.model.remat} {request.program}")
            plan = make_plan(request, libtpu, step_time)
            plans.append(plan)
            bar.write(f"{hardware.name} {summary_line(plan)}", file=sys.stderr)
            return plan

        for each in meshes:
            for remat in remats:
                model = dataclasses.replace(run.model, remat=remat)
                if add(Request(dataclasses.replace(run, model=model), hardware, each)).fits:
                    break
            bar.update()
        if eval_length is not None:
            chosen = best(plans)
            add(Request(run, hardware, read_mesh("mesh", chosen.mesh) if chosen else meshes[0], eval_length))
            bar.update()
    return plans


def best(plans: list[Plan]) -> Plan | None:
    """Return the train step that fits with the least roofline time, or None."""
    fitting = [plan for plan in plans if plan.fits and plan.program == "train step"]
    return min(fitting, key=lambda plan: plan.step_seconds or math.inf, default=None)


# ---- report


def summary_line(plan: Plan) -> str:
    """Return a plan in one line."""
    line = f"{plan.mesh} remat={plan.remat}, {plan.program}, {plan.batch_size} x {plan.length}: "
    if not plan.fits:
        return line + f"no: {plan.reason}"
    line += f"fits, {(plan.peak_bytes or 0) / GIB:.2f} GiB a chip; at least {(plan.step_seconds or 0.0) * 1e3:.1f} ms"
    return line + f" ({plan.binds}-bound), MFU at most {plan.mfu:.0%}"


def to_markdown(run: RunConfig, hardware: Slice, plans: list[Plan]) -> str:
    """Return a table with a line for each plan, and all figures of the best."""
    chip, model, chosen = hardware.chip, run.model, best(plans)
    bias, processor = (type(each).__name__.removesuffix("Config") for each in (model.bias, model.processor))
    lines = [
        f"# {hardware.name}: {hardware.num_chips} chips, compiled ahead of time",
        "",
        f"Per chip: {chip.peak_flops / 1e12:g} TFLOP/s in bfloat16, {chip.hbm_bytes / GIB:.1f} GiB at "
        f"{chip.hbm_bytes_per_second / 1e9:g} GB/s, {chip.link_bytes_per_second / 1e9:g} GB/s from its neighbours "
        f"({chip.source}).",
        f"Model: {model.num_layers} layers, width {model.width}, {model.num_heads} heads, bias {bias}, processor "
        f"{processor}, {model.dtype}.",
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
    lines += ["", *(_details(chosen, hardware) if chosen else ["No mesh that was tried fits."])]
    return "\n".join(lines) + "\n"


def _details(plan: Plan, hardware: Slice) -> list[str]:
    """Return the lines with all figures of a plan that fits."""
    assert plan.peak_bytes
    assert plan.held_bytes
    assert plan.model_flops
    total = sum(plan.model_flops.values())
    lines = [
        f"## Best: {plan.mesh}, remat {plan.remat}, batch {plan.batch_size} x {plan.length} tokens",
        "",
        f"Memory per chip, peak {plan.peak_bytes / MIB:,.0f} MiB, in MiB:",
        "",
        *(f"    {size / MIB:>12,.1f}  {name}" for name, size in plan.held_bytes.items()),
    ]
    if plan.largest:
        lines += ["", "Largest buffers of the program (not all live at the same time), in MiB:", ""]
        lines += [f"    {size / MIB:>12,.1f}  {shape}  {source}" for size, shape, source in plan.largest]
    tokens = plan.batch_size * plan.length
    lines += ["", f"FLOPs of the model, {total:.4g} per step, {total / tokens:.4g} per token:", ""]
    lines += [f"    {flops / total:>12.1%}  {name}" for name, flops in plan.model_flops.items()]
    lines += [
        "",
        "FLOPs of the program, per chip:",
        "",
        f"    {total / hardware.num_chips:>12.4g}  needed by the model",
        f"    {plan.executed_flops:>12.4g}  executed, by formula",
        f"    {plan.matmul_flops:>12.4g}  executed, in the compiled program's matmuls and convolutions",
        "",
        "Collectives (executions, with loops) and GB received per chip:",
        "",
        *(f"    {each['count']:>6}  {each['num_bytes'] / 1e9:>8.3f}  {each['kind']}" for each in plan.collectives),
        f"    trip counts of loops: {', '.join(str(n) if n else 'unknown, counted once' for n in plan.loops)}",
    ]
    if plan.num_full_rematerializations:
        lines += [f"    arrays that the compiler gathered in full to reshard them: {plan.num_full_rematerializations}"]
    if plan.mfu_at_step_time is not None:
        lines += ["", f"MFU at the given step time: {plan.mfu_at_step_time:.1%}"]
    return lines


def save(directory: Path, run: RunConfig, hardware: Slice, plans: list[Plan]) -> None:
    """Write plan.json and plan.md to an existing directory."""
    origin, chosen = provenance("jaxlib", "flax", "optax"), best(plans)
    origin["versions"]["libtpu"] = libtpu_version(find_libtpu())
    record = {
        "topology": hardware.name,
        "num_chips": hardware.num_chips,
        "chip": dataclasses.asdict(hardware.chip),
        "best": chosen and plans.index(chosen),
        "plans": [dataclasses.asdict(plan) for plan in plans],
        "config": resolved(run),
        **{key: origin[key] for key in ("commit", "command", "versions")},
    }
    write_json(directory / "plan.json", record)
    (directory / "plan.md").write_text(to_markdown(run, hardware, plans))
