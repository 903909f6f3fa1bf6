"""Supported chips, and TPU slices for planning.

In: a device kind (`jax.Device.device_kind`) or the name of a slice (v5e:16x16). Out: vendor figures (`Chip`), slices
(`Slice`), model FLOPs utilisation. Next: `planning/`, `kernels/`, `training/loop.py`.
"""

import dataclasses
import importlib.metadata
import math
import os

from dape_jax.errors import require

MIB = 2**20
GIB = 2**30

TPU_PAGES = "Google Cloud documentation, system architecture of TPU"
GPU_SHEET = "NVIDIA data sheet,"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Chip with its vendor's figures."""

    name: str  # first part of a topology's name: v5e
    device_kinds: tuple[str, ...]  # possible values of `jax.Device.device_kind`
    peak_flops: float  # FLOPs per second of bfloat16 matmuls with float32 accumulation, without sparsity
    hbm_bytes: int
    hbm_bytes_per_second: float
    link_bytes_per_second: float  # received over all links together: half of the vendors' bidirectional figure
    source: str  # document with these figures
    vmem_bytes: int | None = None  # VMEM of a core that a Pallas kernel may use; None for a GPU


CHIPS = (
    Chip("v4", ("TPU v4",), 275e12, 32 * GIB, 1228e9, 300e9, f"{TPU_PAGES} v4", 15 * MIB),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * GIB, 819e9, 200e9, f"{TPU_PAGES} v5e", 100 * MIB),
    Chip("v5p", ("TPU v5", "TPU v5p"), 459e12, 95 * GIB, 2765e9, 600e9, f"{TPU_PAGES} v5p", 60 * MIB),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * GIB, 1640e9, 400e9, f"{TPU_PAGES} v6e", 100 * MIB),
    Chip("h100", ("NVIDIA H100 80GB HBM3",), 989.4e12, 80 * 10**9, 3350e9, 450e9, f"{GPU_SHEET} H100 SXM"),
    Chip("h200", ("NVIDIA H200",), 989.4e12, 141 * 10**9, 4800e9, 450e9, f"{GPU_SHEET} H200 SXM"),
)
VMEM_BYTES = {kind: chip.vmem_bytes for chip in CHIPS if chip.vmem_bytes for kind in chip.device_kinds}


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip of a device kind, or None for a CPU or a chip that is not in the table."""
    return next((chip for chip in CHIPS if device_kind in chip.device_kinds), None)


def mfu(flops_per_second: float, device_kind: str, num_devices: int) -> float | None:
    """Return the model FLOPs utilisation: `flops_per_second` over the peak of all devices, or None if it is unknown."""
    chip = chip_of(device_kind)
    return None if chip is None else flops_per_second / (chip.peak_flops * num_devices)


# Package of JAX's plugin for each platform (the start of its name), and the extras that install it.
_PLUGINS = dict.fromkeys(("cuda", "gpu"), ("jax-cuda", ("cuda13", "cuda12"))) | {"tpu": ("libtpu", ("tpu",))}


def platform_fault(error: BaseException) -> str | None:
    """Return a line on the platform that JAX_PLATFORMS asks for and JAX does not find, or None for another error."""
    asked, found = os.environ.get("JAX_PLATFORMS", ""), {}
    for package in importlib.metadata.distributions():
        if package.name == "jax" or package.name.startswith(("jax-", "jaxlib", "libtpu")):
            found[package.name] = package.version
    plugin, extras = _PLUGINS[asked] if asked in _PLUGINS else ("", ())
    is_missing = not any(name.startswith(plugin) for name in found)
    if not is_missing and not str(error).startswith("Unable to initialize backend"):
        return None
    commands = " or ".join(f"pip install 'dape_jax[{extra}]'" for extra in extras)
    allowed = f"must be cpu, cuda or tpu, and the device must be ready: {' '.join(str(error).split())[:300]}"
    installed = ", ".join(f"{name} {number}" for name, number in sorted(found.items()))
    fault = f"its plugin is missing: {commands}; or set JAX_PLATFORMS=cpu" if is_missing else allowed
    return f"JAX_PLATFORMS = {asked!r}: {fault}; installed: {installed}"


# Slices offered by Google Cloud. (libtpu also compiles for others, for example 32x16.)
SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
TOPOLOGIES = {"v4": SHAPES_3D, "v5e": SHAPES_2D, "v5p": SHAPES_3D, "v6e": SHAPES_2D}


@dataclasses.dataclass(frozen=True)
class Slice:
    """TPU slice."""

    name: str  # v5e:4x4
    chip: Chip
    num_chips: int


def read_topology(topology: str) -> Slice:
    """Parse a flag such as `v5e:16x16`.

    Raises:
        InputError: the chip or the shape is unknown; the message lists the known ones.
    """
    name, _, shape = topology.partition(":")
    require(name in TOPOLOGIES, "--topology", topology, f"must be CHIP:SHAPE, with CHIP one of {list(TOPOLOGIES)}")
    known = ", ".join(f"{name}:{shape}" for shape in TOPOLOGIES[name])
    require(shape in TOPOLOGIES[name], "--topology", topology, f"must be one of {known}")
    (chip,) = (chip for chip in CHIPS if chip.name == name)
    return Slice(topology, chip, math.prod(map(int, shape.split("x"))))
