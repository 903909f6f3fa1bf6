"""Where arrays live: the mesh, and one table from the shape legend to mesh axes.

In: parameter names and shapes. Out: shardings. Next: `data/`.

Parameters are named after the shape legend (`up_DF`, `query_DHK`), so the table is over letters. Heads have no axis:
the score convolution mixes them, so attention is sharded over the batch, and over query rows, never over heads.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dape_jax.errors import require

# Mesh axes: `data` holds copies of the parameters, `fsdp` shards of them; the batch is split over both.
AXES = ("data", "fsdp")
BATCH = PartitionSpec(AXES)
PARAMETER_AXES = {"D": "fsdp"}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; -1, for one of them, is whatever devices are left.

    Args:
        data: copies of the parameters.
        fsdp: shards of the parameters.
    """

    data: int
    fsdp: int

    def __post_init__(self):
        for axis in AXES:
            size = getattr(self, axis)
            require(size > 0 or size == -1, f"mesh.{axis}", size, "a positive size, or -1 for the devices left over")
        require((self.data, self.fsdp) != (-1, -1), "mesh", (-1, -1), "-1 for one axis at most")

    def sizes(self, num_devices: int) -> tuple[int, int]:
        """The sizes with -1 resolved.

        Raises:
            InputError: they do not multiply to the number of devices.
        """
        given = self.data * self.fsdp
        left = num_devices // -given if given < 0 else 1
        data, fsdp = (left if size == -1 else size for size in (self.data, self.fsdp))
        require(data * fsdp == num_devices, "mesh", (self.data, self.fsdp), f"must multiply to {num_devices} devices")
        return data, fsdp


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The one mesh of a run. Axes are Auto: the compiler places what the table leaves open."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh(config.sizes(len(devices)), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def parameter_spec(name: str, ndim: int) -> PartitionSpec:
    """PartitionSpec of a parameter, from the letters at the end of its name.

    Leading dims beyond the letters are stacked layers. Vectors and parameters without letters are replicated.
    """
    letters = name.rsplit("_", 1)[-1]
    if not letters.isupper() or len(letters) < 2:
        return PartitionSpec()
    axes = [PARAMETER_AXES.get(letter) for letter in letters]  # a letter that is not in the table is replicated
    return PartitionSpec(*[None] * (ndim - len(letters)), *axes)


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """NamedSharding of every leaf of a nested dict of parameters."""

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, parameter_spec(path[-1].key, leaf.ndim))

    return jax.tree_util.tree_map_with_path(sharding, params)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def shard_batch(x: jax.Array) -> jax.Array:
    """Keep an activation split over the batch, its first dim, in the mesh of `jax.set_mesh`; without ours, as it is.

    Said at the embedding and in every layer: from the parameters' shardings alone the compiler would split the width,
    and compute the whole batch on every device.
    """
    if not set(AXES) <= set(jax.sharding.get_abstract_mesh().axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, BATCH)


def put_batch(batch: dict[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows of a batch -> global arrays, split over the batch."""
    sharding = NamedSharding(mesh, BATCH)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
