"""The mesh of devices, and how arrays lie on it."""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flash_tf.config import StrategyConfig

DATA, FSDP, MODEL, SEQUENCE = AXES = ("data", "fsdp", "model", "sequence")
ROWS = (DATA, FSDP)  # which divide the rows of a batch


def make_mesh(config: StrategyConfig) -> Mesh:
    """The mesh of a config over all devices of all processes. Without `strategy.mesh`, all are on `data`.

    Each index on `data` is a replica. The devices of a replica divide its rows on `fsdp`, its tokens on `sequence`, and
    the features of its layers on `model`.

    Raises:
      ValueError: The mesh has another number of devices.
    """
    devices = jax.device_count()
    sizes = {**dict.fromkeys(AXES, 1), **(config.mesh or {DATA: devices})}
    if math.prod(sizes.values()) != devices:
        said = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name in (DATA, FSDP))
        raise ValueError(f"strategy.mesh must use each of the {devices} devices once, got {said}")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def of_rows(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: equal shares of its rows."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def of_weight(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of a weight: `model` divides its longest axis that it can, and `fsdp` the longest that is left."""
    spec = [None] * len(shape)
    for name in (MODEL, FSDP):
        size = mesh.shape[name]
        axes = [axis for axis, length in enumerate(shape) if spec[axis] is None and length % size == 0]
        if size > 1 and axes:
            spec[max(axes, key=lambda one: shape[one])] = name
    return NamedSharding(mesh, PartitionSpec(*spec))
