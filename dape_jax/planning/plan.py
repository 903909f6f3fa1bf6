"""Plan a run without its hardware: memory on a TPU slice, FLOPs, and a lower bound of the step time.

In: a run's config and a slice. Out: a `Plan` for each mesh that is tried: whether the train step fits, its memory and
its FLOPs. Next: `__main__.py`, the command line.

libtpu compiles the step ahead of time (`compile.py`) and says how much memory it needs; FLOPs are counted by formula
(`model/flops.py`).
"""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.stages import Wrapped

from dape_jax.config import RunConfig, is_algorithmic, resolved
from dape_jax.data.store import STDLIB, follow_corpus
from dape_jax.errors import InputError
from dape_jax.evaluation.programs import batch_size_at, model_at
from dape_jax.files import write_json
from dape_jax.hardware import GIB, MIB, Slice
from dape_jax.model.flops import executed_flops, forward_flops, model_flops
from dape_jax.model.transformer import attention_of, model_structure, parameter_counts
from dape_jax.planning.compile import compile_error, find_libtpu, in_process, libtpu_version, slice_devices
from dape_jax.progress import Progress
from dape_jax.provenance import provenance
from dape_jax.sharding import AXES, BATCH_AXES, MeshConfig, activation_spec, make_mesh, read_mesh
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import abstract_state, make_nll_step, make_train_step, shardings_of

REMATS = ("none", "dots", "full")  # in order of increasing recomputation


# ---- runs and meshes


def run_to_plan(spec: dict[str, Any], batch_size: int | None) -> RunConfig:
    """Return the run of a config as on a TPU: bfloat16 and a padded vocabulary if automatic. No corpus is needed.

    `batch_size` replaces `train.batch_size`, unless it is None.
    """
    spec = json.loads(json.dumps(spec))
    if spec["model"]["dtype"] == "auto":
        spec["model"]["dtype"] = "bfloat16"
    if spec["model"].get("vocab_multiple", 1) is None:
        spec["model"]["vocab_multiple"] = 128
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
    """Return up to 4 meshes to try, in order of increasing communication.

    These are data (if the state is small), fsdp, fsdp x context and fsdp x tensor, the last two with the smallest size
    of their second axis that divides batch, length and model.

    Raises:
        InputError: none of them divides batch, length and model.
    """
    n = hardware.num_chips
    num_params = parameter_counts(model_structure(run.model)[1])["total"]
    is_small = 16 * num_params < hardware.chip.hbm_bytes / 8  # float32 parameters, gradients and two moments
    parts = [2**i for i in range(1, n.bit_length()) if n % 2**i == 0]
    groups = [[{"data": n}] if is_small and n > 1 else [], [{"fsdp": n}]]
    groups += [[{"fsdp": n // part, axis: part} for part in parts] for axis in ("context", "tensor")]
    found, errors = [], []
    for group in groups:
        for sizes in group:
            mesh = MeshConfig(**(dict.fromkeys(AXES, 1) | sizes))
            try:
                run.check_mesh(planned_mesh(mesh, n))
            except InputError as error:
                errors.append(error)
            else:
                found.append(mesh)
                break
    if not found:
        raise errors[0]
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

    def build(self) -> tuple[Mesh, Wrapped, tuple[Any, ...]]:
        """Return the mesh of the slice, the jitted program and the shapes of its arguments. Needs libtpu."""
        mesh, run = make_mesh(self.mesh, slice_devices(self.hardware)), self.run
        optimizer, evaluation = make_optimizer(run.optimizer, run.train.num_steps), run.evaluation
        state = abstract_state(run.model, optimizer, mesh, run.init.trained_kinds)
        rows = jax.ShapeDtypeStruct(
            self.batch_shape(mesh), np.int32, sharding=NamedSharding(mesh, activation_spec("BT"))
        )
        batch = {"inputs": rows, "targets": rows}
        if run.data.packing == "documents" and self.eval_length is None:
            batch |= {"segment_ids": rows, "weights": rows.update(dtype=np.float32)}
        if self.eval_length is not None:
            train_length = run.train.train_length
            graphdef, _ = model_structure(model_at(run.model, self.eval_length, evaluation, "rope", train_length))
            return mesh, make_nll_step(graphdef, min(evaluation.last_tokens, self.eval_length)), (state.params, batch)
        step = make_train_step(
            model_structure(run.model)[0],
            optimizer,
            shardings_of(state),
            accumulation_steps=run.train.accumulation_steps,
            logits_chunk_tokens=run.train.logits_chunk_tokens,
            train_only=run.init.trained_kinds,
        )
        return mesh, step, (state, batch)


def compile_request(request: Request) -> dict[str, Any]:
    """Compile a program for a slice and return fields of its `Plan`; must run in a separate process."""
    mesh, step, arguments = request.build()
    started = time.monotonic()
    with jax.set_mesh(mesh):
        try:
            memory = step.lower(*arguments).compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            return {"fits": False, "reason": compile_error(error)}
    assert memory is not None
    return {
        "fits": True,
        "compile_seconds": time.monotonic() - started,
        "peak_bytes": memory.peak_memory_in_bytes,
        "held_bytes": {
            "arguments": memory.argument_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "other results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "program": memory.generated_code_size_in_bytes,
        },
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
    model_flops: dict[str, int] | None = None  # FLOPs that the model needs, over all chips, by part
    executed_flops: int | None = None  # by formula: with recomputation, masked pairs and replicated computation
    step_seconds: float | None = None  # time of the executed FLOPs at the chip's peak, a lower bound
    mfu: float | None = None  # model FLOPs utilisation at that time, an upper bound


def make_plan(request: Request, libtpu: Path) -> Plan:
    """Compile a program and return its plan."""
    run, hardware, is_train = request.run, request.hardware, request.eval_length is None
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
    return dataclasses.replace(
        plan,
        model_flops=dataclasses.asdict(needed),
        executed_flops=executed,
        step_seconds=executed / hardware.chip.peak_flops,
        mfu=needed.total / (executed * hardware.num_chips),
        **outcome,
    )


def executed_of(run: RunConfig, mesh: Mesh, hardware: Slice) -> int:
    """Return `executed_flops` of a run's train step, over all chips."""
    sizes, train = dict(mesh.shape), run.train
    batch_parts, row_parts = math.prod(sizes[axis] for axis in BATCH_AXES), sizes["context"] * sizes["tensor"]
    chunk_tokens = train.batch_size * train.train_length // (batch_parts * sizes["context"] * train.accumulation_steps)
    is_packed = run.data.packing == "documents"
    kind = hardware.chip.device_kinds[0]
    place = "tpu", kind, row_parts, is_packed
    attention, *others = (
        attention_of(run.model, train.train_length, *place, kind=number) for number in range(len(run.model.layer_kinds))
    )
    return executed_flops(
        dataclasses.replace(run.model, attention=attention),
        train.train_length,
        train.batch_size,
        row_parts=row_parts,
        batch_parts=batch_parts,
        accumulation_steps=train.accumulation_steps,
        chunked_unembedding=chunk_tokens > train.logits_chunk_tokens,
        alternate_attention=others[0] if others else None,
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
    run: RunConfig, hardware: Slice, mesh: MeshConfig | None = None, eval_length: int | None = None
) -> list[Plan]:
    """Plan a run on a slice.

    Args:
        run: the run.
        hardware: the slice.
        mesh: its mesh, with the config's remat. If None, try `candidates`, each with the `REMATS` until one fits.
        eval_length: also compile the evaluator at this length, on the best mesh.

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
            plan = make_plan(request, libtpu)
            plans.append(plan)
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
    """Return the train step that fits with the least recomputation, of equals the first, or None."""
    fitting = [plan for plan in plans if plan.fits and plan.program == "train step"]
    return min(fitting, key=lambda plan: REMATS.index(plan.remat), default=None)


# ---- report


def to_markdown(run: RunConfig, hardware: Slice, plans: list[Plan]) -> str:
    """Return a table with a line for each plan, and all figures of the best."""
    chip, model, chosen = hardware.chip, run.model, best(plans)
    bias, processor = (type(each).__name__.removesuffix("Config") for each in (model.bias, model.processor))
    lines = [
        f"# {hardware.name}: {hardware.num_chips} chips, compiled ahead of time",
        "",
        f"Per chip: {chip.peak_flops / 1e12:g} TFLOP/s in bfloat16, {chip.hbm_bytes / GIB:.1f} GiB ({chip.source}).",
        f"Model: {model.num_layers} layers, width {model.width}, {model.num_heads} heads, bias {bias}, processor "
        f"{processor}, {model.dtype}.",
        "",
        "| program | mesh | remat | fits | GiB a chip | ms at least | MFU at most |",
        "|---|---|---|---|---|---|---|",
    ]
    for plan in plans:
        cells = [plan.program, plan.mesh, plan.remat, "yes" if plan.fits else f"no: {plan.reason}", "", "", ""]
        if plan.fits and plan.step_seconds and plan.peak_bytes:
            cells[4:] = [f"{plan.peak_bytes / GIB:.2f}", f"{plan.step_seconds * 1e3:.1f}", f"{plan.mfu:.0%}"]
        lines.append(f"| {' | '.join(cells)} |" + (" **best**" if plan is chosen else ""))
    if chosen is None:
        return "\n".join([*lines, "", "No mesh that was tried fits."]) + "\n"
    assert chosen.peak_bytes
    assert chosen.held_bytes
    assert chosen.model_flops
    total, tokens = sum(chosen.model_flops.values()), chosen.batch_size * chosen.length
    lines += [
        "",
        f"## Best: {chosen.mesh}, remat {chosen.remat}, batch {chosen.batch_size} x {chosen.length} tokens",
        "",
        f"Memory per chip, peak {chosen.peak_bytes / MIB:,.0f} MiB, in MiB:",
        "",
        *(f"    {size / MIB:>12,.1f}  {name}" for name, size in chosen.held_bytes.items()),
        "",
        f"FLOPs of the model, {total:.4g} per step, {total / tokens:.4g} per token:",
        "",
        *(f"    {flops / total:>12.1%}  {name}" for name, flops in chosen.model_flops.items()),
        "",
        f"FLOPs per chip: {total / hardware.num_chips:.4g} needed by the model, {chosen.executed_flops:.4g} executed "
        "by the program, with recomputation and masked pairs.",
    ]
    return "\n".join(lines) + "\n"


def save(directory: Path, run: RunConfig, hardware: Slice, plans: list[Plan]) -> None:
    """Write plan.json to an existing directory."""
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
