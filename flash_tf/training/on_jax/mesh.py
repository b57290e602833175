"""The mesh of devices, and how arrays lie on it."""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flash_tf.config import StrategyConfig

DATA, FSDP = "data", "fsdp"
ROWS = PartitionSpec((DATA, FSDP))  # of a batch


def make_mesh(config: StrategyConfig) -> Mesh:
    """The mesh of a config over all devices of all processes. Without `strategy.mesh`, all are on `data`.

    Each index on `data` is a replica. The devices of a replica, on `fsdp`, hold a part of every weight and of its
    optimizer state each, and gather a layer's weights when they compute it.

    Raises:
      ValueError: The mesh has another number of devices.
    """
    devices = jax.device_count()
    shape = {DATA: 1, FSDP: 1, **config.mesh} if config.mesh else {DATA: devices, FSDP: 1}
    if math.prod(shape.values()) != devices:
        sizes = " x ".join(f"{name} {size}" for name, size in shape.items())
        raise ValueError(f"strategy.mesh must use each of the {devices} devices once, got {sizes}")
    return jax.make_mesh((shape[DATA], shape[FSDP]), (DATA, FSDP), axis_types=(AxisType.Auto, AxisType.Auto))


def of_rows(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: equal shares of its rows on all devices."""
    return NamedSharding(mesh, ROWS)


def of_weight(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of a weight: its longest axis that `fsdp` divides is in equal parts, if there is one."""
    size = mesh.shape[FSDP]
    axes = [axis for axis, length in enumerate(shape) if length % size == 0]
    if size == 1 or not axes:
        return NamedSharding(mesh, PartitionSpec())
    axis = max(axes, key=lambda one: shape[one])
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, FSDP))
