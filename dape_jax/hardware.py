"""Supported chips, and TPU slices and groups of GPUs for planning.

In: a device kind (`jax.Device.device_kind`) or a name (v5e:16x16, v5p-8, h100:8). Out: vendor figures (`Chip`), slices
(`Slice`), model FLOPs utilisation. Next: `planning/`, `kernels/`, `training/loop.py`.
"""

import dataclasses
import importlib.metadata
import math
import os

from dape_jax.errors import install_command, require

MIB = 2**20
GIB = 2**30
LANES = 128  # of a register of a TPU

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
    source: str  # document with these figures
    vmem_bytes: int | None = None  # VMEM of a core that a Pallas kernel may use; None for a GPU


CHIPS = (
    Chip("v4", ("TPU v4",), 275e12, 32 * GIB, 1228e9, f"{TPU_PAGES} v4", 15 * MIB),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * GIB, 819e9, f"{TPU_PAGES} v5e", 100 * MIB),
    Chip("v5p", ("TPU v5", "TPU v5p"), 459e12, 95 * GIB, 2765e9, f"{TPU_PAGES} v5p", 60 * MIB),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * GIB, 1640e9, f"{TPU_PAGES} v6e", 100 * MIB),
    Chip("a100", ("NVIDIA A100-SXM4-80GB",), 312e12, 80 * 10**9, 2039e9, f"{GPU_SHEET} A100 80GB SXM"),
    Chip("h100", ("NVIDIA H100 80GB HBM3",), 989.4e12, 80 * 10**9, 3350e9, f"{GPU_SHEET} H100 SXM"),
    Chip("h200", ("NVIDIA H200",), 989.4e12, 141 * 10**9, 4800e9, f"{GPU_SHEET} H200 SXM"),
    Chip("b200", ("NVIDIA B200",), 2250e12, 180 * 10**9, 8000e9, f"{GPU_SHEET} HGX B200"),
)
UTILISATION = 0.1  # of plans by default: that of DAPE's Triton kernel on an H100 (docs/planning.md)
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
    commands = " or ".join(map(install_command, extras))
    allowed = f"must be cpu, cuda or tpu, and the device must be ready: {' '.join(str(error).split())[:300]}"
    installed = ", ".join(f"{name} {number}" for name, number in sorted(found.items()))
    fault = f"its plugin is missing: {commands}; or set JAX_PLATFORMS=cpu" if is_missing else allowed
    return f"JAX_PLATFORMS = {asked!r}: {fault}; installed: {installed}"


# Slices offered by Google Cloud. (libtpu also compiles for others, for example 32x16.)
SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
TOPOLOGIES = {"v4": SHAPES_3D, "v5e": SHAPES_2D, "v5p": SHAPES_3D, "v6e": SHAPES_2D}
GPUS = ("a100", "h100", "h200", "b200")
# The cloud's names end with a number of chips, or of cores where a chip has two: v5e-8 is v5e:2x4, v5p-8 v5p:2x2x1.
# Here, each with its chip and the cores that it counts.
CLOUD_NAMES = {"v4": ("v4", 2), "v5litepod": ("v5e", 1), "v5e": ("v5e", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1)}


@dataclasses.dataclass(frozen=True)
class Slice:
    """TPU slice, group of GPUs, or the devices of this process."""

    name: str  # v5e:4x4, h100:8
    chip: Chip
    num_chips: int
    platform: str = "tpu"  # tpu, gpu or cpu
    is_attached: bool = False  # whether they are the devices of this process

    @property
    def memory_bytes(self) -> int:
        """Return the memory of a chip that a program may use: of a GPU, the 75 % that JAX takes by default."""
        is_part = self.platform == "gpu" and not self.is_attached  # attached GPUs tell their limit
        return 3 * self.chip.hbm_bytes // 4 if is_part else self.chip.hbm_bytes


def read_topology(topology: str) -> Slice:
    """Parse a flag such as `v5e:16x16`, the cloud's name for it, `v5litepod-256`, or `h100:8`, a number of GPUs.

    Raises:
        InputError: the chip or the shape is unknown; the message lists the known ones.
    """
    name, _, shape = topology.partition(":")
    cloud_name, dash, number = topology.partition("-")
    if dash and cloud_name in CLOUD_NAMES:
        name, cores = CLOUD_NAMES[cloud_name]
        shapes = {str(cores * num_chips_of(each)): each for each in TOPOLOGIES[name]}
        known = ", ".join(f"{cloud_name}-{each}" for each in shapes)
        require(number in shapes, "--topology", topology, f"must be one of {known}")
        shape = shapes[number]
    allowed = f"must be CHIP:SHAPE, with CHIP one of {list(TOPOLOGIES)}, a name such as v5litepod-8, or GPU:NUMBER, "
    require(name in (*TOPOLOGIES, *GPUS), "--topology", topology, f"{allowed}with GPU one of {list(GPUS)}")
    if name in GPUS:
        is_number = shape.isascii() and shape.isdigit() and int(shape) > 0
        require(is_number, "--topology", topology, f"must be {name}:NUMBER, for example {name}:8")
    else:
        known = ", ".join(f"{name}:{shape}" for shape in TOPOLOGIES[name])
        require(shape in TOPOLOGIES[name], "--topology", topology, f"must be one of {known}")
    (chip,) = (chip for chip in CHIPS if chip.name == name)
    return Slice(f"{name}:{shape}", chip, num_chips_of(shape), "gpu" if name in GPUS else "tpu")


def num_chips_of(shape: str) -> int:
    """Return the number of chips of a shape, such as 4x4, or 8."""
    return math.prod(map(int, shape.split("x")))
