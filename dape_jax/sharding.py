"""Sharding: the mesh, and one table from the shape legend to mesh axes.

In: names of parameters, letters of activations. Out: shardings. Next: `data/`.

Parameters are named after the shape legend (`up_DF`, `query_DHK`), so the table maps letters to axes. It is the same
for parameters and activations, except that only parameters are split over D, and only activations over B and T.

Heads are never split inside attention: the score convolution mixes them, so a device with some of the heads would need
the scores of all others. Query rows are independent, so attention is split over the batch and over query rows:
`context` splits the rows of a sequence throughout the model; `tensor` splits heads in the projections around attention
and rows inside it (`attention.attend_on_mesh`).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from dape_jax.errors import require

# Mesh axes, slowest network first: `data` replicates the parameters (between slices), `fsdp` shards them, and the batch
# is split over both; `context` splits sequences, `tensor` heads, feed-forward width and vocabulary.
AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")
ROW_AXES = ("context", "tensor")  # attention splits query rows over these

# Dims with letters in neither table are replicated.
BOTH_AXES = {"F": "tensor", "V": "tensor", "H": "tensor", "G": "tensor"}
PARAMETER_AXES = BOTH_AXES | {"D": "fsdp"}
ACTIVATION_AXES = BOTH_AXES | {"B": BATCH_AXES, "T": "context"}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; one of them may be -1, for all remaining devices."""

    data: int = 1  # copies of the parameters; a multiple of the number of slices
    fsdp: int = -1  # shards of the parameters
    context: int = 1  # parts of each sequence
    tensor: int = 1  # parts of heads, feed-forward width and vocabulary

    def __post_init__(self):
        for axis, size in vars(self).items():
            require(size > 0 or size == -1, f"mesh.{axis}", size, "must be positive, or -1 for all remaining devices")
        require(dataclasses.astuple(self).count(-1) < 2, "mesh", self.asked(), "must have -1 for at most one axis")

    def asked(self) -> str:
        """Return the sizes other than 1 as a flag: fsdp=4,context=2."""
        return ",".join(f"{axis}={size}" for axis, size in vars(self).items() if size != 1) or "data=1"

    def sizes(self, num_devices: int) -> tuple[int, ...]:
        """Return the sizes in the order of `AXES`, with -1 resolved.

        Raises:
            InputError: the product of the sizes is not the number of devices.
        """
        asked = dataclasses.astuple(self)
        given = math.prod(size for size in asked if size != -1)
        sizes = tuple(num_devices // given if size == -1 else size for size in asked)
        require(math.prod(sizes) == num_devices, "mesh", self.asked(), f"must multiply to {num_devices} devices")
        return sizes

    def abstract(self, num_devices: int) -> AbstractMesh:
        """Return a mesh for shapes and shardings only, without devices; see `sizes`."""
        return AbstractMesh(self.sizes(num_devices), AXES)


def read_mesh(field: str, text: str) -> MeshConfig:
    """Parse the value of a flag, such as `fsdp=4,context=2`; axes that are not given have size 1."""
    items = [item.partition("=")[::2] for item in text.split(",")]
    given = {axis: int(size) for axis, size in items if axis in AXES and re.fullmatch("-?[0-9]+", size)}
    allowed = f"must be axis=size,axis=size with axes of {list(AXES)}, each once"
    require(len(given) == len(items), field, text, allowed)
    return MeshConfig(**dict.fromkeys(AXES, 1) | given)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Make the mesh of a run. Axes are Auto: the compiler shards arrays that are not in the table.

    Raises:
        InputError: the product of the axes is not the number of devices, or `data` is not a multiple of the slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = config.sizes(len(devices))
    types = (AxisType.Auto,) * len(AXES)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices == 1:
        return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
    require(sizes[0] % num_slices == 0, "mesh.data", sizes[0], f"must be a multiple of the {num_slices} slices")
    within, between = (sizes[0] // num_slices, *sizes[1:]), (num_slices, 1, 1, 1)
    return Mesh(mesh_utils.create_hybrid_device_mesh(within, between, devices), AXES, axis_types=types)


def mesh_of_all_devices(width: int) -> MeshConfig:
    """Return a mesh of all devices that shards the parameters over as many devices as the width D allows."""
    return MeshConfig(data=-1, fsdp=math.gcd(jax.device_count(), width), context=1, tensor=1)


def parameter_spec(name: str, ndim: int) -> PartitionSpec:
    """Return the PartitionSpec of a parameter, from the letters at the end of its name.

    Leading dims without letters are stacked layers. Vectors, and parameters without letters, are replicated, and so are
    heads without D: only projections are split by head, not biases and score convolutions.
    """
    letters = name.rsplit("_", 1)[-1]
    if not letters.isupper() or len(letters) < 2:
        return PartitionSpec()
    whole = "" if "D" in letters else "HG"
    axes = [None if letter in whole else PARAMETER_AXES.get(letter) for letter in letters]
    return PartitionSpec(*[None] * (ndim - len(letters)), *axes)


def parameter_shardings(params: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the NamedSharding of every leaf of a nested dict of parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, parameter_spec(path[-1].key, leaf.ndim)), params
    )


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of a value that is the same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def activation_spec(letters: str) -> PartitionSpec:
    """Return the PartitionSpec of an activation with these dims."""
    return PartitionSpec(*[ACTIVATION_AXES.get(letter) for letter in letters])


def in_mesh() -> bool:
    """Return whether the mesh of `jax.set_mesh` has the axes `AXES`."""
    return set(AXES) <= set(jax.sharding.get_abstract_mesh().axis_names)


def device_platform() -> str:
    """Return the platform of the (possibly abstract) devices of `jax.set_mesh`'s mesh, or else of JAX's backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def this_device_kind() -> str:
    """Return the `device_kind` of the devices of `device_platform`, for example "TPU v5 lite"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def axis_sizes() -> dict[str, int]:
    """Return the sizes of the axes in the mesh of `jax.set_mesh`; all 1 unless `in_mesh`."""
    return dict(jax.sharding.get_abstract_mesh().shape) if in_mesh() else dict.fromkeys(AXES, 1)


def constrain(x: jax.Array, letters: str) -> jax.Array:
    """Shard an activation by the table, in the mesh of `jax.set_mesh`; return it unchanged unless `in_mesh`.

    The constraint is needed at the embedding and in every layer: from the parameters' shardings alone, the compiler
    would split the width and compute the whole batch on every device.
    """
    if not in_mesh():
        return x
    return jax.lax.with_sharding_constraint(x, activation_spec(letters))


def full_precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Return the `precision` of a matmul that does not round operands of this dtype.

    By default TPUs round float32 operands to bfloat16, and GPUs round them to TF32.
    """
    return None if jnp.dtype(dtype).itemsize < 4 else jax.lax.Precision.HIGHEST


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """Return float32 for a narrower dtype, and others as they are.

    `jnp.promote_types` raises for 16 bits where `jax_numpy_dtype_promotion` is "strict".
    """
    return np.promote_types(dtype, jnp.float32)


def wide(x: jax.Array) -> jax.Array:
    """Return an array in float32 or better: in 16 bits, distances, sums and their gradients would be rounded."""
    return x.astype(at_least_float32(x.dtype))


def vary_alike(*trees: Any) -> Any:
    """Mark all arrays as varying over every mesh axis that any of them varies over.

    A function with a gradient of its own needs this in a user's `shard_map`: JAX sums the gradient of a replicated
    array over devices only where the array is marked.
    """
    leaves, structure = jax.tree.flatten(trees)
    axes = [jax.typeof(x).manual_axis_type.varying for x in leaves]
    union = frozenset().union(*axes)
    varying = [jax.lax.pcast(x, tuple(union - own), to="varying") for x, own in zip(leaves, axes, strict=True)]
    return structure.unflatten(varying)


def split_batch(function: Callable[..., jax.Array], batched: Sequence[Any], shared: Sequence[Any]) -> jax.Array:
    """Call `function(*batched, *shared)` on arrays of a mesh with explicit axes, as `jax.make_mesh` makes by default.

    The batch is the first dim of the result and of all arrays of `batched`. If the first of these is split over the
    batch alone, every device computes its own sequences, as in `jax.shard_map`; otherwise the compiler splits the work.
    The result is split like that array. On arrays of other meshes, or of none, the function is only called.
    """
    split, arrays = jax.typeof(batched[0]).sharding, jax.tree.leaves((batched, shared))
    if split.mesh.empty or not any(any(jax.typeof(x).sharding.spec) for x in arrays):
        return function(*batched, *shared)
    if not split.spec[0] or any(split.spec[1:]):
        return jax.jit(jax.sharding.auto_axes(function, out_sharding=split))(*batched, *shared)
    mesh, batch, whole = split.mesh, PartitionSpec(split.spec[0]), PartitionSpec()
    specs = (batch,) * len(batched) + (whole,) * len(shared)
    axes = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}

    def of_devices(*args: Any) -> jax.Array:
        args = jax.sharding.reshard(args, tuple(NamedSharding(mesh, spec) for spec in specs))
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=batch, axis_names=axes)(*args)

    return jax.jit(of_devices)(*batched, *shared)


def matmul(equation: str, x: jax.Array, weight: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Compute an einsum of an activation and a parameter, "BTD,DF->BTF", also in the mesh of `jax.set_mesh`.

    The letters are those of the tables. On a mesh, each device gathers the weight's shards over `fsdp` and multiplies
    them with its part of the activation. If the summed dim is split over `tensor`, the partial sums are added. The
    collectives are explicit, so that nothing is computed twice, weights are gathered in the dtype of the matmul, and
    gradients are reduce-scattered. The result has the dtype of the arguments, or `dtype`.
    """
    precision = full_precision(x.dtype)
    if not in_mesh():
        return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=dtype)
    inputs, result = equation.split("->")
    x_letters, weight_letters = inputs.split(",")
    weight_spec = parameter_spec(f"_{weight_letters}", weight.ndim)
    summed = tuple({ACTIVATION_AXES[letter] for letter in set(x_letters) - set(result) if letter in ACTIVATION_AXES})

    def on_device(x: jax.Array, weight: jax.Array) -> jax.Array:
        if "fsdp" in weight_spec:
            weight = jax.lax.all_gather(weight, "fsdp", axis=weight_spec.index("fsdp"), tiled=True)
        y = jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=dtype)
        return jax.lax.psum(y, summed) if summed else y

    specs = activation_spec(x_letters), weight_spec
    return jax.shard_map(on_device, in_specs=specs, out_specs=activation_spec(result))(x, weight)


def embed(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return rows of an embedding table; on a mesh, gather rows split over the width like the table, then reshard.

    The intermediate constraints are needed: otherwise XLA all-gathers the table, or the batch, on every device.
    """
    if not in_mesh():
        return table_VD[tokens_BT]
    split_width = PartitionSpec("data", "context", "fsdp")
    tokens_BT = jax.lax.with_sharding_constraint(tokens_BT, PartitionSpec(*split_width[:2]))
    return constrain(jax.lax.with_sharding_constraint(table_VD[tokens_BT], split_width), "BTD")


def stripe(x: jax.Array, dim: int) -> jax.Array:
    """Reorder a sequence so that `context` device i of n has rows i, n + i, 2 n + i, ..

    With contiguous parts the last device would have nearly all visible keys of a causal mask, and the first almost
    none. With stripes, local row t of device i sees t n + i + 1 keys: the work of devices differs by less than n / T,
    and not at all in a program with the same shapes on every device.

        rows        0 1 2 3 4 5 6 7
        n = 4       0 4 | 1 5 | 2 6 | 3 7
    """
    return _transposed(x, dim, (-1, axis_sizes()["context"]))


def unstripe(x: jax.Array, dim: int) -> jax.Array:
    """Undo `stripe`."""
    return _transposed(x, dim, (axis_sizes()["context"], -1))


def last_rows(x: jax.Array, num_rows: int, dim: int) -> jax.Array:
    """Return the last rows of a sequence, in the order of `stripe` like `x`; the parts of a row divide `num_rows`."""
    return stripe(jax.lax.slice_in_dim(unstripe(x, dim), x.shape[dim] - num_rows, None, axis=dim), dim)


def _transposed(x: jax.Array, dim: int, parts: tuple[int, int]) -> jax.Array:
    if 1 in parts:
        return x
    return x.reshape(*x.shape[:dim], *parts, *x.shape[dim + 1 :]).swapaxes(dim, dim + 1).reshape(x.shape)


def check_mesh(mesh: Mesh | AbstractMesh, sizes: dict[str, tuple[str, int]]) -> None:
    """Raise `InputError` unless the sizes, letter -> (config field, size), are divisible by the sizes of their axes."""
    needed = {"D": ("fsdp",), "T": ROW_AXES} | {letter: (axis,) for letter, axis in BOTH_AXES.items()}
    for letter, (field, size) in sizes.items():
        parts = math.prod(mesh.shape[axis] for axis in needed[letter])
        axes = " x ".join(f"mesh.{axis}" for axis in needed[letter])
        require(size % parts == 0, field, size, f"must be a multiple of {axes} = {parts}")


@functools.cache
def batch_part(mesh: Mesh) -> tuple[int, int]:
    """Return the index of the part of a batch's rows that this process loads, and the number of parts.

    Processes with the same rows (if `context` or `tensor` spans processes) load the same part.

    Raises:
        InputError: the rows of two processes overlap partially.
    """
    num_rows, by_process = mesh.size, dict[int, set[int]]()
    for device, (rows,) in NamedSharding(mesh, activation_spec("B")).devices_indices_map((num_rows,)).items():
        by_process.setdefault(device.process_index, set()).update(range(*rows.indices(num_rows)))
    parts = sorted({tuple(sorted(rows)) for rows in by_process.values()})
    allowed = f"must not give {len(by_process)} processes overlapping parts of a batch"
    require(all(len(part) * len(parts) == num_rows for part in parts), "mesh", dict(mesh.shape), allowed)
    return parts.index(tuple(sorted(by_process[jax.process_index()]))), len(parts)


def rows_of_part(batch: dict[str, np.ndarray], part: int, num_parts: int) -> dict[str, np.ndarray]:
    """Return one part of a batch's rows; see `batch_part`."""
    return {name: np.split(rows, num_parts)[part] for name, rows in batch.items()}


def put_batch(batch: dict[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Make global arrays of this process's part of a batch: rows split over `BATCH_AXES`, sequences over `context`.

    The arrays have dims B, or B and T, and the rows of `batch_part`, each with its whole sequence.
    """

    def put(local: np.ndarray) -> jax.Array:
        sharding = NamedSharding(mesh, activation_spec("BT"[: local.ndim]))
        shape = (local.shape[0] * batch_part(mesh)[1], *local.shape[1:])  # of a dim that is whole, devices take parts
        return jax.make_array_from_process_local_data(sharding, local, shape)

    return {name: put(rows) for name, rows in batch.items()}
