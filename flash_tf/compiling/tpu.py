"""Compiles a training step for a TPU on any CPU host, and reports whether it fits and what it costs."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile

# The compiler must not see the settings of the host's own devices.
DROPPED = ("TPU_", "LIBTPU_", "XLA_", "JAX_", "PJRT_")
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server says which TPU this is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu locks the TPU, and none is used here
}
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """One device of XLA: a chip, or one of a chip's two cores.

    Attributes:
      name: The device's name for people.
      layout: The topology's name for libtpu.
      chip_config: libtpu's name for the use of a chip's cores; empty if there is only one.
      flops: Peak in bfloat16, FLOP/s.
      bandwidth: Bandwidth of HBM, bytes/s.
      clock: Clock frequency, Hz.
      hbm: Bytes of HBM that libtpu 0.0.51 leaves to a program.
      unit: Side of a matrix unit.
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
    """The chip of one generation."""

    axes: int
    flops: float
    bandwidth: float
    clock: float
    unit: int
    hbm: float  # GiB of a whole chip that libtpu leaves to a program: it keeps up to 1.25 GiB (v4) for itself
    core_hbm: float = 0.0  # the same for one core; 0 if a chip has one core
    default: str = ""  # a key of `configs`
    configs: dict = dataclasses.field(default_factory=dict)  # use of the cores -> libtpu's name for it


# Google publishes the peaks and bandwidths. A clock follows from the peak and the matrix units: four units of
# 128 x 128 multiply-adds a core on v4, v5e and v5p. Google publishes two units of 256 x 256 for v6e, but libtpu's
# estimates reach 369,000 FLOPs a cycle, more than the 262,144 of two units. So we count four, which gives 1.75 GHz.
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
    " (the default is :core for v4, :megacore for v5p); v5e and v6e with two sides, as v5e:1x1 and v6e:2x4"
)


def find_device(topology: str) -> Device:
    """Finds the device of a topology.

    Args:
      topology: For example `v5e:2x2` or `v6e:2x2`. A device of `v4:2x2x1` is one core of a chip, a device of
        `v4:2x2x1:megacore` both cores. A device of `v5p:2x2x1` is the whole chip, a device of `v5p:2x2x1:core` one
        core.

    Raises:
      ValueError: There is no such topology. The message says which there are.
    """
    found = re.fullmatch(r"(\w+):([1-9]\d{0,3}(?:x[1-9]\d{0,3})+)(?::(\w+))?", topology)
    generation = GENERATIONS.get(found[1]) if found else None
    cores = (found[3] or generation.default) if generation else ""
    if generation is None or cores not in (generation.configs or ("",)):
        raise no_such_topology(topology)
    if found[2].count("x") + 1 != generation.axes:
        raise no_such_topology(topology)
    devices_per_chip = 2 if cores == "core" else 1
    names = {"core": ", one of a chip's two cores", "megacore": ", both cores of a chip", "": " chip"}
    return Device(
        name=f"TPU {found[1]}{names[cores]}",
        layout=f"{found[1]}:{found[2]}",
        chip_config=generation.configs.get(cores, ""),
        flops=generation.flops / devices_per_chip,
        bandwidth=generation.bandwidth / devices_per_chip,
        clock=generation.clock,
        hbm=round((generation.core_hbm if devices_per_chip == 2 else generation.hbm) * GIB),
        unit=generation.unit,
    )


def no_such_topology(topology: str) -> ValueError:
    """The error for a topology that does not exist."""
    return ValueError(f"there is no TPU topology {topology!r}; there are {KNOWN}")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A TPU compiler's analysis of a program that was not run. A field is None if the compiler did not get that far.

    Attributes:
      topology: The topology, as the caller named it.
      device: The device's name for people.
      compiles: Whether the compiler accepts the program.
      fits: Whether it compiles and fits in HBM.
      problem: The reason why not, one line; empty if it fits.
      hbm_bytes: Peak memory: arguments, results that replace no argument, temporaries. If it does not fit, the need.
      hbm_limit_bytes: HBM that libtpu leaves to a program: a little less than the chip has.
      flops: XLA's count, with loops counted.
      bytes: XLA's count of the bytes that all operations read and write, on the chip or off it, with loops counted.
      hbm_traffic_bytes: The bytes that go to HBM or come from it.
      estimated_cycles: The compiler's estimate for all operations of its schedule. Transfers beside them cost nothing.
      estimated_ms: The same at the chip's clock.
      roofline_ms: FLOPs at the bfloat16 peak or `hbm_traffic_bytes` at HBM's bandwidth, whichever takes longer.
      unestimated: Opcode -> how many operations of 64 KiB or more have no estimate.
      unestimated_traffic_bytes: Their share of `hbm_traffic_bytes`.
      unestimated_ms: Their time at HBM's bandwidth, the least that `estimated_ms` leaves out.
      loops: `name` and `trip_count` of each loop.
      costliest: The ten kinds of operation with the most cycles; see `compiled_hlo.costliest`.
      padding_waste: Share of the matrix unit's work that is padding.
    """

    topology: str
    device: str
    compiles: bool
    fits: bool
    problem: str
    hbm_limit_bytes: int
    hbm_bytes: int | None = None
    flops: float | None = None
    bytes: float | None = None
    hbm_traffic_bytes: int | None = None
    estimated_cycles: int | None = None
    estimated_ms: float | None = None
    roofline_ms: float | None = None
    unestimated: dict[str, int] | None = None
    unestimated_traffic_bytes: int | None = None
    unestimated_ms: float | None = None
    loops: list[dict] | None = None
    costliest: list[dict] | None = None
    padding_waste: float | None = None


def compile_for(serialized: bytes, topology: str) -> Estimate:
    """Compiles a program for one device of a topology, without a TPU. 24 layers take two minutes and 8 GiB.

    Args:
      serialized: HLO that `hlo.load` can read.
      topology: For example `v4:2x2x1` or `v4:2x2x1:megacore`; see `find_device`.

    Raises:
      ValueError: There is no such topology, the bytes are no HLO module, a loop's trip count is unknown, jax or libtpu
        is missing or too old, or the compiler crashed.
    """
    device = find_device(topology)
    result = _in_child(serialized, topology)
    common = {"topology": topology, "device": device.name, "hbm_limit_bytes": device.hbm}
    if "problem" in result:
        return Estimate(**common, compiles=False, fits=False, **result)
    times = (result["flops"] / device.flops, result["hbm_traffic_bytes"] / device.bandwidth)
    return Estimate(
        **common,
        compiles=True,
        fits=True,
        problem="",
        estimated_ms=1e3 * result["estimated_cycles"] / device.clock,
        roofline_ms=1e3 * max(times),
        unestimated_ms=1e3 * result["unestimated_traffic_bytes"] / device.bandwidth,
        **result,
    )


def analyse(serialized: bytes) -> dict:
    """Compiles a program for a CPU and counts its FLOPs, bytes and memory. It shows how costs grow, at any size.

    Args:
      serialized: HLO that `hlo.load` can read.

    Returns:
      `flops` and `bytes` (read and written by all operations), both with loops counted; `hbm_bytes`, peak memory.

    Raises:
      ValueError: As for `compile_for`.
    """
    return _in_child(serialized)


def _in_child(serialized, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/step.hlo.pb", "wb") as file:
            file.write(serialized)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED)}  # noqa: TID251  a child's
        command = [sys.executable, "-P", "-m", "flash_tf.compiling.tpu_worker", folder, *arguments]
        child = subprocess.run(
            command,
            env=inherited | SETTINGS,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if child.returncode == 0:
            with open(f"{folder}/result.json") as file:
                result = json.load(file)
            if "error" in result:
                raise ValueError(result["error"])
            return result
    if child.returncode == -signal.SIGKILL:
        raise ValueError(
            "the compiler was killed (signal 9), probably because memory ran out: it needs more than is free"
        )
    said = [line for line in child.stderr.splitlines() if line.strip()]
    last = said[-1].strip() if said else "it said nothing"
    end = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
    raise ValueError(f"the compiler crashed ({end}): {last[:300]}")


def as_dict(estimate: Estimate) -> dict:
    """The estimate as plain values, for JSON."""
    return dataclasses.asdict(estimate)


def as_text(estimate: Estimate) -> str:
    """The estimate as a table for people."""
    e = estimate
    verdict = "compiles and fits" if e.fits else e.problem
    rows = [(e.topology, f"{e.device}: {verdict}")]
    if e.compiles:
        rows += _figures(e)
    text = "\n".join(f"{name:<20}{value}" for name, value in rows)  # the same layout as `describe`
    return f"{text}\n\n{_costliest(e)}" if e.costliest else text


def _figures(r):
    used, limit = r.hbm_bytes / 2**20, r.hbm_limit_bytes / 2**20
    rows = [
        ("HBM", f"{used:,.1f} MiB of {limit:,.0f} MiB that a program may use"),
        ("work", f"{r.flops / 1e12:,.3f} TFLOP, {r.hbm_traffic_bytes / 1e9:,.2f} GB to and from HBM"
         f" ({r.bytes / 1e9:,.2f} GB with what stays on the chip)"),
        ("estimated", f"{r.estimated_ms:,.2f} ms, {r.estimated_cycles / 1e6:,.2f} M cycles, by the compiler"),
        ("roofline", f"{r.roofline_ms:,.2f} ms at the peak of FLOPs or of HBM's bandwidth"),
        ("padding", f"{r.padding_waste:.1%} of the matrix unit's work"),
    ]  # fmt: skip
    rows += [("loop", f"{loop['name']} runs {loop['trip_count']:,} times") for loop in r.loops]
    if r.unestimated:
        counted = ", ".join(f"{n} {opcode}" for opcode, n in sorted(r.unestimated.items()))
        rows.append(("without estimate", f"{counted}: {r.unestimated_ms:,.2f} ms at HBM's bandwidth"))
    return rows


def _costliest(r):
    lines = ["   share  estimated ms  times  operation, result"]
    for row in r.costliest:
        ms = r.estimated_ms * row["share"]
        what = row["operation"] or row["name"]
        lines.append(f"{row['share']:8.1%}  {ms:12.3f}  {row['count']:5,}  {what} ({row['kind']}): {row['shape']}")
    return "\n".join(lines)
