"""The TPUs that programs are compiled for, and what they can do at best."""

import dataclasses
import re

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """What XLA takes for one device: a chip, or one of a chip's two cores.

    Attributes:
      name: To read.
      layout: The topology's name as libtpu takes it.
      chip_config: libtpu's name for how a chip's cores are used; empty where there is one way.
      flops: bfloat16 peak, FLOPs a second.
      bandwidth: Of HBM, bytes a second.
      clock: Hz.
      hbm: Bytes that libtpu 0.0.51 leaves to a program.
      unit: Rows and columns of a matrix unit.
    """

    name: str
    layout: str
    chip_config: str
    flops: float
    bandwidth: float
    clock: float
    hbm: int
    unit: int


@dataclasses.dataclass(frozen=True)
class _Generation:
    """One generation's chip; `cores` is how libtpu takes its cores by default and the names of both ways."""

    axes: int
    flops: float
    bandwidth: float
    clock: float
    unit: int
    hbm: float  # GiB left to a program by libtpu, of a whole chip: it keeps up to 1.25 GiB (v4) for itself
    core_hbm: float = 0.0  # of one core; 0 where a chip has one
    default: str = ""
    configs: dict = dataclasses.field(default_factory=dict)


# Peaks and bandwidths as Google publishes them. The clocks are those at which the matrix units give the peaks:
# four of 128 x 128 multiply-adds a core on v4, v5e, v5p. On v6e two units of 256 x 256 are published, but libtpu's
# estimates reach 369,000 FLOPs a cycle, which is more than the 262,144 of two: it must be as with four, 1.75 GHz.
GENERATIONS = {
    "v4": _Generation(
        axes=3, flops=275e12, bandwidth=1228e9, clock=1.05e9, unit=128, hbm=30.75, core_hbm=15.25,
        default="core", configs={"core": "legacy", "megacore": "megacore"},
    ),
    "v5e": _Generation(axes=2, flops=197e12, bandwidth=819e9, clock=1.5e9, unit=128, hbm=15.75),
    "v5p": _Generation(
        axes=3, flops=459e12, bandwidth=2765e9, clock=1.75e9, unit=128, hbm=95.73, core_hbm=47.74,
        default="megacore", configs={"core": "legacy", "megacore": "megacore"},
    ),
    "v6e": _Generation(axes=2, flops=918e12, bandwidth=1640e9, clock=1.75e9, unit=256, hbm=31.24),
}  # fmt: skip

KNOWN = (
    "v4 and v5p with three sides, as v4:2x2x1 and v5p:4x4x4, then :core or :megacore for one core or both as a device"
    " (v4 has :core by default, v5p :megacore); v5e and v6e with two, as v5e:1x1 and v6e:2x4"
)


def device(topology: str) -> Device:
    """The device that a topology is made of.

    Args:
      topology: `v4:2x2x1`, one of whose devices is one core of a chip; `v4:2x2x1:megacore`, both cores of a chip;
        likewise `v5p:2x2x1:core` and `v5p:2x2x1`, the whole chip; `v5e:2x2`; `v6e:2x2`.

    Raises:
      ValueError: When there is no such topology; says which there are.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)(?::(\w+))?", topology)
    generation = GENERATIONS.get(found[1]) if found else None
    cores = (found[3] or generation.default) if generation else ""
    if generation is None or cores not in (generation.configs or ("",)):
        raise no_such(topology)
    if found[2].count("x") + 1 != generation.axes:
        raise no_such(topology)
    part = 2 if cores == "core" else 1
    names = {"core": ", one of a chip's two cores", "megacore": ", both cores of a chip", "": " chip"}
    return Device(
        name=f"TPU {found[1]}{names[cores]}",
        layout=f"{found[1]}:{found[2]}",
        chip_config=generation.configs.get(cores, ""),
        flops=generation.flops / part,
        bandwidth=generation.bandwidth / part,
        clock=generation.clock,
        hbm=round((generation.core_hbm if part == 2 else generation.hbm) * GIB),
        unit=generation.unit,
    )


def no_such(topology: str) -> ValueError:
    """The error for a topology that does not exist."""
    return ValueError(f"there is no TPU topology {topology!r}; there are {KNOWN}")
