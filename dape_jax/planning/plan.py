"""Plan a run without its hardware: memory on a TPU slice or on GPUs, FLOPs, hours, and the command that trains.

In: a run's config and a slice. Out: a `Plan` for each mesh that is tried: whether the train step fits, its memory and
its FLOPs. Next: `__main__.py`, the command line.

For TPUs, libtpu compiles the step ahead of time (`compile.py`) and says how much memory it needs; for the devices of
this process, their own compiler. For other GPUs the memory is estimated by formula (`memory.py`). FLOPs are counted by
formula (`model/flops.py`).
"""

import dataclasses
import functools
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Wrapped

from dape_jax.config import RunConfig, is_algorithmic, resolved
from dape_jax.data.store import STDLIB, follow_corpus
from dape_jax.distributed import wait_for_all
from dape_jax.errors import InputError
from dape_jax.files import write_json
from dape_jax.hardware import GIB, UTILISATION, Chip, Slice, chip_of
from dape_jax.model.attention import Implementation
from dape_jax.model.flops import executed_flops, model_flops
from dape_jax.model.transformer import attention_of, model_structure, parameter_counts
from dape_jax.planning.compile import compile_error, find_libtpu, in_process, libtpu_version, slice_devices
from dape_jax.planning.memory import estimate_memory
from dape_jax.progress import Progress
from dape_jax.provenance import provenance
from dape_jax.sharding import AXES, BATCH_AXES, ROW_AXES, MeshConfig, activation_spec, make_mesh, read_mesh
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import abstract_state, make_train_step, shardings_of

REMATS = ("none", "dots", "full")  # in order of increasing recomputation


# ---- runs and meshes


def run_to_plan(spec: dict[str, Any]) -> RunConfig:
    """Return a run as on an accelerator: bfloat16 and a padded vocabulary if automatic. No corpus is needed."""
    spec = json.loads(json.dumps(spec))
    if spec["model"]["dtype"] == "auto":
        spec["model"]["dtype"] = "bfloat16"
    if "vocab_multiple" in spec["model"] and spec["model"]["vocab_multiple"] is None:
        spec["model"]["vocab_multiple"] = 128
    has_text = any(value for field, value in spec["data"].items() if field in ("path", "mixture"))
    if not is_algorithmic(spec) and not has_text:
        spec["data"]["path"] = STDLIB
    is_known = is_algorithmic(spec) or spec["model"]["vocab_size"] is not None
    return RunConfig.from_dict(spec if is_known else follow_corpus(spec))


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
                run.check_mesh(mesh.abstract(n))
            except InputError as error:
                errors.append(error)
            else:
                found.append(mesh)
                break
    if not found:
        raise errors[0]
    return found


def attached() -> Slice:
    """Return the devices of this process and of those that it has joined."""
    device, num_devices = jax.local_devices()[0], jax.device_count()
    stats = device.memory_stats()
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = ram_bytes // jax.local_device_count() if stats is None else stats["bytes_limit"]
    known = chip_of(device.device_kind) or Chip(device.device_kind, (device.device_kind,), math.nan, 0, 0, "unknown")
    chip = dataclasses.replace(known, hbm_bytes=memory)
    return Slice(f"{num_devices} x {device.device_kind}", chip, num_devices, device.platform, is_attached=True)


# ---- memory


@dataclasses.dataclass(frozen=True)
class Request:
    """Train step of a run on a slice."""

    run: RunConfig
    hardware: Slice

    @property
    def mesh(self) -> AbstractMesh:
        """Return the run's mesh, without devices."""
        return self.run.mesh.abstract(self.hardware.num_chips)

    @property
    def attentions(self) -> list[Implementation]:
        """Return the implementation of attention of each of `model.layer_kinds`."""
        run, chip = self.run, self.hardware.chip
        place = self.hardware.platform, chip.device_kinds[0], math.prod(self.mesh.shape[axis] for axis in ROW_AXES)
        is_packed, kinds = run.data.packing == "documents", range(len(run.model.layer_kinds))
        return [attention_of(run.model, run.train.train_length, *place, is_packed, kind=kind) for kind in kinds]

    def build(self) -> tuple[Mesh, Wrapped, tuple[Any, ...]]:
        """Return the mesh of the slice, the jitted step and the shapes of its arguments. A TPU's needs libtpu."""
        devices = jax.devices() if self.hardware.is_attached else slice_devices(self.hardware)
        run, mesh = self.run, make_mesh(self.run.mesh, devices)
        optimizer = make_optimizer(run.optimizer, run.train.num_steps)
        state = abstract_state(run.model, optimizer, mesh, run.init.trained_kinds)
        shape, sharding = (run.train.batch_size, run.train.train_length), NamedSharding(mesh, activation_spec("BT"))
        rows = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
        batch = {"inputs": rows, "targets": rows}
        if run.data.packing == "documents":
            batch |= {"segment_ids": rows, "weights": rows.update(dtype=np.float32)}
        step = make_train_step(
            model_structure(run.model)[0],
            optimizer,
            shardings_of(state),
            accumulation_steps=run.train.accumulation_steps,
            logits_chunk_tokens=run.train.logits_chunk_tokens,
            train_only=run.init.trained_kinds,
        )
        return mesh, step, (state, batch)


Measure = Callable[[Request], dict[str, Any]]  # returns the fields of a `Plan` that tell its memory


def compile_request(request: Request) -> dict[str, Any]:
    """Compile a step for a slice and return fields of its `Plan`. For a TPU, run it in a separate process."""
    mesh, step, arguments = request.build()
    started = time.monotonic()
    with jax.set_mesh(mesh):
        try:
            memory = step.lower(*arguments).compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            return {"fits": False, "reason": compile_error(error)}
    assert memory is not None
    held = {
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "other results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    # Only libtpu's peak includes temporary memory.
    peak_bytes = memory.peak_memory_in_bytes if request.hardware.platform == "tpu" else sum(held.values())
    seconds = time.monotonic() - started
    return {"fits": True, "compile_seconds": seconds, "peak_bytes": peak_bytes, "held_bytes": held}


def estimate(request: Request) -> dict[str, Any]:
    """Return fields of the `Plan` of a step by formula; see `memory.py`."""
    state = state_bytes(request)
    held = {"arguments": sum(state.values())}
    held |= estimate_memory(request.run, request.mesh, state, request.attentions)
    return {"fits": True, "peak_bytes": sum(held.values()), "held_bytes": held}


def state_bytes(request: Request) -> dict[str, int]:
    """Return the memory of the parameters and the optimizer's moments on each chip, exactly."""
    run = request.run
    optimizer = make_optimizer(run.optimizer, run.train.num_steps)
    state = abstract_state(run.model, optimizer, request.mesh, run.init.trained_kinds)

    def bytes_on_chip(tree: Any) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    return {"parameters": bytes_on_chip(state.params), "moments": bytes_on_chip(state.opt_state)}


# ---- plans


@dataclasses.dataclass(frozen=True)
class Plan:
    """Figures of a train step on one mesh; they are for one chip, unless stated otherwise."""

    mesh: str  # in the notation of `--mesh`
    remat: str  # rematerialisation policy of the layers
    batch_size: int  # sequences, over all chips
    length: int  # tokens in a sequence
    fits: bool  # whether it compiles and fits in the chips' memory
    reason: str | None = None  # why it does not fit
    compile_seconds: float | None = None  # None: the memory is by formula
    peak_bytes: int | None = None
    # By purpose: parameters, moments, batch, temporary (activations, gradients, gathered weights), program.
    held_bytes: dict[str, int] | None = None
    model_flops: dict[str, int] | None = None  # FLOPs that the model needs, over all chips, by part
    executed_flops: int | None = None  # by formula: with recomputation, masked pairs and replicated computation
    step_seconds: float | None = None  # time of the executed FLOPs at the chip's peak, a lower bound
    mfu: float | None = None  # model FLOPs utilisation at that time, an upper bound


def make_plan(request: Request, measure: Measure) -> Plan:
    """Find the memory of a step and return its plan."""
    run, hardware = request.run, request.hardware
    plan = Plan(run.mesh.asked(), run.model.remat, run.train.batch_size, run.train.train_length, fits=False)
    outcome = measure(request)
    if not outcome["fits"]:
        return dataclasses.replace(plan, **outcome)
    if outcome["peak_bytes"] > hardware.memory_bytes:
        needed, available = (f"{size / GIB:.1f} GiB" for size in (outcome["peak_bytes"], hardware.memory_bytes))
        return dataclasses.replace(plan, reason=f"needs {needed} of {available}")
    needed = model_flops(run.model, plan.length, plan.batch_size)
    executed = executed_of(request) // hardware.num_chips
    state, held = state_bytes(request), outcome.pop("held_bytes")
    return dataclasses.replace(
        plan,
        held_bytes=state | {"batch and padding": held.pop("arguments") - sum(state.values())} | held,
        model_flops=dataclasses.asdict(needed),
        executed_flops=executed,
        step_seconds=executed / hardware.chip.peak_flops,
        mfu=needed.total / (executed * hardware.num_chips),
        **outcome,
    )


def executed_of(request: Request) -> int:
    """Return `executed_flops` of a train step, over all chips."""
    sizes, run, train = request.mesh.shape, request.run, request.run.train
    batch_parts, row_parts = (math.prod(sizes[axis] for axis in axes) for axes in (BATCH_AXES, ROW_AXES))
    chunk_tokens = train.batch_size * train.train_length // (batch_parts * sizes["context"] * train.accumulation_steps)
    attention, *others = request.attentions
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


def plan_run(run: RunConfig, hardware: Slice, mesh: MeshConfig | None = None, by_formula: bool = False) -> list[Plan]:
    """Plan a run on a slice.

    Args:
        run: the run.
        hardware: the slice.
        mesh: its mesh, with the config's remat. If None, try `candidates`, each with the `REMATS` until one fits.
        by_formula: whether to estimate the memory instead of compiling.

    Raises:
        InputError: sizes are not divisible, or libtpu is missing; raised before anything is compiled.
    """
    if mesh is None:
        meshes, remats = candidates(run, hardware), REMATS
    else:
        run.check_mesh(mesh.abstract(hardware.num_chips))
        meshes, remats = [mesh], (run.model.remat,)
    if by_formula or (hardware.platform == "gpu" and not hardware.is_attached):
        measure = estimate
    elif hardware.is_attached:
        measure = compile_request
    else:
        measure = functools.partial(in_process, compile_request, libtpu=find_libtpu())
    plans: list[Plan] = []
    with Progress(meshes, unit="mesh", desc=hardware.name) as bar:
        for each in bar:
            for remat in remats:
                bar.set_postfix_str(f"{each.asked()} remat={remat}")
                plans.append(make_plan(Request(changed(run, each, remat), hardware), measure))
                if plans[-1].fits:
                    break
    return plans


def changed(run: RunConfig, mesh: MeshConfig, remat: str, **train: Any) -> RunConfig:
    """Return a run on another mesh, with another remat, and with changes of its section `train`."""
    model = dataclasses.replace(run.model, remat=remat)
    return dataclasses.replace(run, mesh=mesh, model=model, train=dataclasses.replace(run.train, **train))


def best(plans: list[Plan]) -> Plan | None:
    """Return the plan that fits with the least recomputation, of equals the first, or None."""
    fitting = [plan for plan in plans if plan.fits]
    return min(fitting, key=lambda plan: REMATS.index(plan.remat), default=None)


def largest_batch(run: RunConfig, hardware: Slice, plans: list[Plan]) -> int | None:
    """Return the largest doubling or halving of a run's batch that fits by formula, or None.

    The formula is scaled to the memory of the best plan. If no plan fits, it is that of the last one.
    """
    chosen = best(plans)
    plan, available = chosen or plans[-1], hardware.memory_bytes
    mesh = read_mesh("mesh", plan.mesh)
    share = math.prod(mesh.sizes(hardware.num_chips)[: len(BATCH_AXES)]) * run.train.accumulation_steps

    def peak(batch_size: int) -> int:
        return estimate(Request(changed(run, mesh, plan.remat, batch_size=batch_size), hardware))["peak_bytes"]

    batch_size = plan.batch_size
    if chosen is not None and chosen.peak_bytes is not None:
        scale = chosen.peak_bytes / peak(batch_size)
        while scale * peak(2 * batch_size) <= available:
            batch_size *= 2
        return batch_size
    while batch_size % (2 * share) == 0:
        batch_size //= 2
        if peak(batch_size) <= available:
            return batch_size
    return None


def costs(run: RunConfig, hardware: Slice, plan: Plan, utilisation: float) -> dict[str, float]:
    """Return steps, tokens, FLOPs of the model, and hours and chip-hours at this utilisation, of a whole run.

        hours = FLOPs / (chips x peak x utilisation) / 3600

    They are NaN for a chip of unknown peak. Validations, checkpoints and compilation are not counted.
    """
    assert plan.model_flops
    flops = run.train.num_steps * sum(plan.model_flops.values())
    chip_hours = flops / (hardware.chip.peak_flops * utilisation * 3600)
    return {
        "steps": run.train.num_steps,
        "tokens": run.train.num_steps * plan.batch_size * plan.length,
        "flops": flops,
        "utilisation": utilisation,
        "hours": chip_hours / hardware.num_chips,
        "chip_hours": chip_hours,
    }


def train_command(run: RunConfig, plan: Plan, given: Sequence[str]) -> str:
    """Return the command that trains as planned: `given` flags, and those for which the plan differs from the config.

    If the config has no text, it is the standard library's, in place of a corpus.
    """
    sizes, asked = vars(read_mesh("mesh", plan.mesh)), vars(run.mesh)
    added = {f"mesh.{axis}": size for axis, size in sizes.items() if size != asked[axis]}
    added |= {} if plan.remat == run.model.remat else {"model.remat": plan.remat}
    added |= {"data.path": STDLIB} if run.data.path == STDLIB else {}
    own = [f"--config.{field}={value}" for field, value in added.items()]
    return shlex.join(["dape-train", *dict.fromkeys([*given, *own])])


# ---- report


def to_markdown(run: RunConfig, hardware: Slice, plans: list[Plan], utilisation: float, given: Sequence[str]) -> str:
    """Return a table with a line for each plan, and memory, costs and `train_command` of the best."""
    chip, model, chosen = hardware.chip, run.model, best(plans)
    bias, processor = (type(each).__name__.removesuffix("Config") for each in (model.bias, model.processor))
    num_params = parameter_counts(model_structure(model)[1])["total"]
    is_known = not math.isnan(chip.peak_flops)
    peak = f" and {chip.peak_flops / 1e12:g} TFLOP/s" if is_known else ""
    lines = [
        f"# {hardware.name}: {hardware.memory_bytes / GIB:.1f} GiB{peak} a chip",
        "",
        f"{num_params:,} parameters: {model.num_layers} layers, width {model.width}, {model.num_heads} heads, {bias}, "
        f"{processor}, {model.dtype}",
        "",
        "| mesh | remat | fits | GiB a chip | ms at least | MFU at most |",
        "|---|---|---|---|---|---|",
    ]
    for plan in plans:
        cells = [plan.mesh, plan.remat, "yes" if plan.fits else f"no: {plan.reason}", "", "", ""]
        if plan.fits and plan.step_seconds and plan.peak_bytes:
            least = f"{plan.step_seconds * 1e3:.1f}" if is_known else ""
            cells[3:] = [f"{plan.peak_bytes / GIB:.2f}", least, f"{plan.mfu:.0%}"]
        lines.append(f"| {' | '.join(cells)} |" + (" **best**" if plan is chosen else ""))
    largest = largest_batch(run, hardware, plans)
    batch = "no batch fits" if largest is None else f"{largest:,} x {plans[0].length:,} tokens, estimated"
    if chosen is None:
        advice = "a larger one needs --config.train.accumulation_steps"
        return "\n".join([*lines, "", "No mesh that was tried fits.", f"largest batch  {batch}; {advice}"]) + "\n"
    assert chosen.held_bytes
    how = "by formula" if chosen.compile_seconds is None else "compiled"
    parts = ", ".join(f"{size / GIB:.2f} {name}" for name, size in chosen.held_bytes.items() if size >= GIB / 100)
    cost = costs(run, hardware, chosen, utilisation)
    steps = f"{cost['steps']:,} steps of {chosen.batch_size:,} x {chosen.length:,} tokens"
    time_text = f"unknown: the peak of {chip.name} is not known; train some steps, and read tokens/s in the log"
    if is_known:
        assert chosen.step_seconds
        least = cost["steps"] * chosen.step_seconds / 3600
        hours, chip_hours, least_hours = (
            f"{each:,.1f}" if each >= 1 else f"{each:.2g}" if each >= 0.01 else "< 0.01"
            for each in (cost["hours"], cost["chip_hours"], least)
        )
        time_text = f"{hours} hours, {chip_hours} chip-hours at a utilisation of {utilisation:.0%}"
        time_text += f" (--utilisation); at least {least_hours} hours"
    lines += [
        "",
        f"memory         {how}, in GiB a chip: {parts}",
        f"largest batch  {batch}",
        f"run            {steps}: {cost['tokens']:.3g} tokens, {cost['flops']:.3g} FLOPs",
        f"time           {time_text}",
        f"train          {train_command(run, chosen, given)}",
    ]
    return "\n".join(lines) + "\n"


def save(directory: Path, run: RunConfig, hardware: Slice, plans: list[Plan], utilisation: float) -> None:
    """Write plan.json to an existing directory."""
    origin, chosen = provenance("jaxlib", "flax", "optax"), best(plans)
    if hardware.platform == "tpu" and any(plan.compile_seconds for plan in plans):
        origin["versions"]["libtpu"] = libtpu_version(find_libtpu())
    record = {
        "topology": hardware.name,
        "num_chips": hardware.num_chips,
        "chip": dataclasses.asdict(hardware.chip),
        "best": chosen and plans.index(chosen),
        "costs": chosen and costs(run, hardware, chosen, utilisation),
        "largest_batch": largest_batch(run, hardware, plans),
        "plans": [dataclasses.asdict(plan) for plan in plans],
        "config": resolved(run),
        **{key: origin[key] for key in ("commit", "command", "versions")},
    }
    write_json(directory / "plan.json", record)


def print_attached(spec: dict[str, Any], given: Sequence[str]) -> None:
    """Compile a training step for the devices of this process, and print its plan: `dape-train --plan`."""
    run, hardware = RunConfig.from_dict(follow_corpus(spec)), attached()
    run = dataclasses.replace(run, mesh=MeshConfig(*run.mesh.sizes(hardware.num_chips)))
    plans = plan_run(run, hardware, run.mesh)
    wait_for_all("planning")  # a process that ended while another compiles would end it
    if jax.process_index() == 0:
        print(to_markdown(run, hardware, plans, UTILISATION, given), end="")
