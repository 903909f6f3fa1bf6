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
from collections.abc import Sequence
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
from dape_jax.model.flops import model_flops
from dape_jax.model.transformer import attention_of, model_structure, parameter_counts
from dape_jax.planning.compile import compile_error, find_libtpu, in_process, libtpu_version, slice_devices
from dape_jax.planning.memory import estimate_memory
from dape_jax.progress import Progress
from dape_jax.provenance import provenance
from dape_jax.sharding import AXES, BATCH_AXES, ROW_AXES, MeshConfig, activation_spec, make_mesh
from dape_jax.training.step import Training, abstract_state, make_train_step

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


# ---- one step


@dataclasses.dataclass(frozen=True)
class Plan:
    """Train step of a run on a slice. Its figures are for one chip, unless stated otherwise."""

    run: RunConfig
    hardware: Slice
    fits: bool = False  # whether it compiles and fits in the chips' memory
    reason: str | None = None  # why it does not fit
    compile_seconds: float | None = None  # None: the memory is by formula
    peak_bytes: int | None = None
    # By purpose: parameters, moments, batch, temporary (activations, gradients, gathered weights), program.
    held_bytes: dict[str, int] | None = None

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
        training = Training.of(run, mesh)
        shape, sharding = (run.train.batch_size, run.train.train_length), NamedSharding(mesh, activation_spec("BT"))
        rows = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
        batch = {"inputs": rows, "targets": rows}
        if run.data.packing == "documents":
            batch |= {"segment_ids": rows, "weights": rows.update(dtype=np.float32)}
        return mesh, make_train_step(training), (abstract_state(training), batch)

    @property
    def state_bytes(self) -> dict[str, int]:
        """Return the memory of the parameters and the optimizer's moments, exactly."""
        state = abstract_state(Training.of(self.run, self.mesh))

        def bytes_on_chip(tree: Any) -> int:
            leaves = jax.tree.leaves(tree)
            return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

        return {"parameters": bytes_on_chip(state.params), "moments": bytes_on_chip(state.opt_state)}

    @property
    def model_flops(self) -> int:
        """Return the FLOPs that the model needs for the step, over all chips."""
        return model_flops(self.run.model, self.run.train.train_length, self.run.train.batch_size)

    def figures(self) -> dict[str, Any]:
        """Return what is known of the step as JSON values, for plan.json."""
        run, outcome = self.run, ("fits", "reason", "compile_seconds", "peak_bytes", "held_bytes")
        return {
            "mesh": run.mesh.asked(),
            "remat": run.model.remat,
            "batch_size": run.train.batch_size,
            "length": run.train.train_length,
            **{field: getattr(self, field) for field in outcome},
            "model_flops": self.model_flops,
        }

    def costs(self, utilisation: float) -> dict[str, float]:
        """Return steps, tokens, FLOPs of the model, and hours and chip-hours at this utilisation, of a whole run.

            hours = FLOPs / (chips x peak x utilisation) / 3600

        They are NaN for a chip of unknown peak. Validations, checkpoints and compilation are not counted.
        """
        train = self.run.train
        flops = train.num_steps * self.model_flops
        chip_hours = flops / (self.hardware.chip.peak_flops * utilisation * 3600)
        return {
            "steps": train.num_steps,
            "tokens": train.num_steps * train.batch_size * train.train_length,
            "flops": flops,
            "utilisation": utilisation,
            "hours": chip_hours / self.hardware.num_chips,
            "chip_hours": chip_hours,
        }


# ---- memory


def compile_step(plan: Plan) -> dict[str, Any]:
    """Compile a step for its slice and return the outcome, for `measured`. For a TPU, run it in a separate process."""
    mesh, step, arguments = plan.build()
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
    peak_bytes = memory.peak_memory_in_bytes if plan.hardware.platform == "tpu" else sum(held.values())
    seconds = time.monotonic() - started
    return {"fits": True, "compile_seconds": seconds, "peak_bytes": peak_bytes, "held_bytes": held}


def estimate(plan: Plan) -> dict[str, Any]:
    """Return the same outcome by formula; see `memory.py`."""
    state = plan.state_bytes
    held = {"arguments": sum(state.values())} | estimate_memory(plan.run, plan.mesh, state, plan.attentions)
    return {"fits": True, "peak_bytes": sum(held.values()), "held_bytes": held}


def measured(plan: Plan, outcome: dict[str, Any]) -> Plan:
    """Return a plan with an outcome, in whose `held_bytes` the state and the batch are together "arguments"."""
    if outcome["fits"]:
        state, held, available = plan.state_bytes, dict(outcome["held_bytes"]), plan.hardware.memory_bytes
        rest = held.pop("arguments") - sum(state.values())
        outcome = outcome | {"held_bytes": state | {"batch and padding": rest} | held}
        if outcome["peak_bytes"] > available:
            reason = f"needs {outcome['peak_bytes'] / GIB:.1f} GiB of {available / GIB:.1f} GiB"
            outcome |= {"fits": False, "reason": reason}
    return dataclasses.replace(plan, **outcome)


# ---- plans


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
    measure = compile_step if hardware.is_attached and not by_formula else estimate
    if not by_formula and not hardware.is_attached and hardware.platform == "tpu":
        measure = functools.partial(in_process, compile_step, libtpu=find_libtpu())
    plans: list[Plan] = []
    with Progress(meshes, unit="plan", desc=hardware.name) as bar:
        for each in bar:
            for remat in remats:
                bar.set_postfix_str(f"{each.asked()} remat={remat}")
                plan = Plan(changed(run, each, remat), hardware)
                plans.append(measured(plan, measure(plan)))
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
    return min(fitting, key=lambda plan: REMATS.index(plan.run.model.remat), default=None)


def largest_batch(plans: list[Plan]) -> int | None:
    """Return the largest doubling or halving of a run's batch that fits by formula, or None.

    The formula is scaled to the memory of the best plan. If no plan fits, it is that of the last one.
    """
    plan = best(plans) or plans[-1]
    run, available, batch_size = plan.run, plan.hardware.memory_bytes, plan.run.train.batch_size

    def peak(batch_size: int) -> int:
        resized = changed(run, run.mesh, run.model.remat, batch_size=batch_size)
        return estimate(Plan(resized, plan.hardware))["peak_bytes"]

    if plan.fits and plan.peak_bytes is not None:
        scale = plan.peak_bytes / peak(batch_size)
        while scale * peak(2 * batch_size) <= available:
            batch_size *= 2
        return batch_size
    share = math.prod(plan.mesh.shape[axis] for axis in BATCH_AXES) * run.train.accumulation_steps
    while batch_size % (2 * share) == 0:
        batch_size //= 2
        if peak(batch_size) <= available:
            return batch_size
    return None


def train_command(run: RunConfig, plan: Plan, given: Sequence[str]) -> str:
    """Return the command that trains as planned: `given` flags, and those for which the plan differs from the config.

    If the config has no text, it is the standard library's, in place of a corpus.
    """
    asked, planned = vars(run.mesh), vars(plan.run.mesh)
    added = {f"mesh.{axis}": size for axis, size in planned.items() if size != asked[axis]}
    added |= {} if plan.run.model.remat == run.model.remat else {"model.remat": plan.run.model.remat}
    added |= {"data.path": STDLIB} if run.data.path == STDLIB else {}
    own = [f"--config.{field}={value}" for field, value in added.items()]
    return shlex.join(["dape-train", *dict.fromkeys([*given, *own])])


# ---- report


def to_markdown(run: RunConfig, plans: list[Plan], utilisation: float, given: Sequence[str]) -> str:
    """Return a table with a line for each plan of a run, and memory, costs and `train_command` of the best."""
    hardware, model, train, chosen = plans[0].hardware, run.model, run.train, best(plans)
    bias, processor = (type(each).__name__.removesuffix("Config") for each in (model.bias, model.processor))
    num_params = parameter_counts(model_structure(model)[1])["total"]
    is_known = not math.isnan(hardware.chip.peak_flops)
    peak = f" and {hardware.chip.peak_flops / 1e12:g} TFLOP/s" if is_known else ""
    lines = [
        f"# {hardware.name}: {hardware.memory_bytes / GIB:.1f} GiB{peak} a chip",
        "",
        f"{num_params:,} parameters: {model.num_layers} layers, width {model.width}, {model.num_heads} heads, {bias}, "
        f"{processor}, {model.dtype}",
        "",
        "| mesh | remat | fits | GiB a chip |",
        "|---|---|---|---|",
    ]
    for plan in plans:
        cells = [plan.run.mesh.asked(), plan.run.model.remat, "yes" if plan.fits else f"no: {plan.reason}"]
        cells.append(f"{plan.peak_bytes / GIB:.3g}" if plan.fits and plan.peak_bytes else "")
        lines.append(f"| {' | '.join(cells)} |" + (" **best**" if plan is chosen else ""))
    largest = largest_batch(plans)
    batch = "no batch fits" if largest is None else f"{largest:,} x {train.train_length:,} tokens, estimated"
    if chosen is None:
        batch += "" if largest is None else "; a larger one needs --config.train.accumulation_steps"
        return "\n".join([*lines, "", "No mesh that was tried fits.", f"largest batch  {batch}"]) + "\n"
    assert chosen.held_bytes
    how = "by formula" if chosen.compile_seconds is None else "compiled"
    held, total = chosen.held_bytes, sum(chosen.held_bytes.values())
    parts = ", ".join(f"{size / GIB:.3g} {name}" for name, size in held.items() if 100 * size >= total)
    cost = chosen.costs(utilisation)
    steps = f"{train.num_steps:,} steps of {train.batch_size:,} x {train.train_length:,} tokens"
    time_text = f"unknown, like the peak of {hardware.chip.name}; train some steps, and read tokens/s in the log"
    if is_known:
        hours, chip_hours = (
            f"{each:,.1f}" if each >= 1 else f"{each:.2g}" if each >= 0.01 else "< 0.01"
            for each in (cost["hours"], cost["chip_hours"])
        )
        time_text = f"{hours} hours, {chip_hours} chip-hours at a utilisation of {utilisation:.0%} (--utilisation)"
    lines += [
        "",
        f"memory         {how}, in GiB a chip: {parts}",
        f"largest batch  {batch}",
        f"run            {steps}: {cost['tokens']:.3g} tokens, {cost['flops']:.3g} FLOPs",
        f"time           {time_text}",
        f"train          {train_command(run, chosen, given)}",
    ]
    return "\n".join(lines) + "\n"


def save(directory: Path, run: RunConfig, plans: list[Plan], utilisation: float) -> None:
    """Write plan.json to an existing directory."""
    origin, hardware, chosen = provenance("jaxlib", "flax", "optax"), plans[0].hardware, best(plans)
    if hardware.platform == "tpu" and any(plan.compile_seconds for plan in plans):
        origin["versions"]["libtpu"] = libtpu_version(find_libtpu())
    record = {
        "topology": hardware.name,
        "num_chips": hardware.num_chips,
        "chip": dataclasses.asdict(hardware.chip),
        "best": chosen and plans.index(chosen),
        "costs": chosen and chosen.costs(utilisation),
        "largest_batch": largest_batch(plans),
        "plans": [plan.figures() for plan in plans],
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
        print(to_markdown(run, plans, UTILISATION, given), end="")
