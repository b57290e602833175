"""Compiles a training step for a TPU on any CPU host, and says whether it fits and what it would cost."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile

from flash_tf.compiling import tpu_chips

# Settings of the host's own devices must not reach the compiler.
DROPPED = ("TPU_", "LIBTPU_", "XLA_", "JAX_", "PJRT_")
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask which TPU this is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it guards a TPU, of which none is used
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compiler for a TPU says of a program; nothing was run. None where it did not get that far.

    Attributes:
      topology: As it was asked for.
      device: What the program was compiled for, to read.
      compiles: Whether the compiler took it.
      fits: Whether it compiles and fits in HBM.
      problem: Why not, one line; empty if it does.
      hbm_bytes: Peak: arguments, results that replace no argument, temporaries. What is needed, if it does not fit.
      hbm_limit_bytes: What libtpu leaves to a program: a little less than the chip has.
      flops: XLA's count, with loops counted.
      bytes: XLA's count of what all operations read and write, on the chip or off it, with loops counted.
      hbm_traffic_bytes: Of those, what goes to HBM or comes from it.
      estimated_cycles: The compiler's estimate for all operations of its schedule; transfers beside them cost nothing.
      estimated_ms: The same at the chip's clock.
      roofline_ms: FLOPs at the bfloat16 peak or `hbm_traffic_bytes` at HBM's bandwidth, whichever takes longer.
      unestimated: Opcode -> how many operations of 64 KiB or more have no estimate.
      unestimated_traffic_bytes: Their part of `hbm_traffic_bytes`.
      unestimated_ms: What they would take at HBM's bandwidth, the least that `estimated_ms` leaves out.
      loops: `name` and `trip_count` of each loop.
      costliest: The ten kinds of operation with most of the cycles; see `schedule.costliest`.
      padding_waste: Share of the matrix unit's work that goes into padding.
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


def compile_for(serialized: bytes, topology: str) -> Report:
    """Compiles a program for one device of a topology, without a TPU: for 24 layers in some two minutes and 8 GiB.

    Args:
      serialized: HLO as `hlo.load` reads it.
      topology: `v4:2x2x1`, `v4:2x2x1:megacore`, `v5e:2x2`, `v5p:2x2x1`, `v6e:2x2`, …; see `tpu_chips.device`.

    Raises:
      ValueError: When there is no such topology, the bytes are no HLO module, a loop's trip count is not known, jax
        or libtpu is missing or too old, or the compiler crashed.
    """
    device = tpu_chips.device(topology)
    result = _in_child(serialized, topology)
    common = {"topology": topology, "device": device.name, "hbm_limit_bytes": device.hbm}
    if "problem" in result:
        return Report(**common, compiles=False, fits=False, **result)
    times = (result["flops"] / device.flops, result["hbm_traffic_bytes"] / device.bandwidth)
    return Report(
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
    """FLOPs, bytes and memory of a program as XLA compiles it for a CPU: how costs grow, at any size.

    Args:
      serialized: HLO as `hlo.load` reads it.

    Returns:
      `flops`, `bytes` (read and written by all operations), both with loops counted, and `hbm_bytes`, the peak of
      memory.

    Raises:
      ValueError: As `compile_for`.
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
            "the compiler was killed (signal 9), as it is where memory runs out: it needs more than is free"
        )
    said = [line for line in child.stderr.splitlines() if line.strip()]
    last = said[-1].strip() if said else "it said nothing"
    end = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
    raise ValueError(f"the compiler crashed ({end}): {last[:300]}")


def as_dict(report: Report) -> dict:
    """The report as plain values, for JSON."""
    return dataclasses.asdict(report)


def as_text(report: Report) -> str:
    """The report for people."""
    r = report
    verdict = "compiles and fits" if r.fits else r.problem
    rows = [(r.topology, f"{r.device}: {verdict}")]
    if r.compiles:
        rows += _figures(r)
    text = "\n".join(f"{name:<20}{value}" for name, value in rows)  # as `describe` has it
    return f"{text}\n\n{_costliest(r)}" if r.costliest else text


def _figures(r):
    used, limit = r.hbm_bytes / 2**20, r.hbm_limit_bytes / 2**20
    rows = [
        ("HBM", f"{used:,.1f} MiB of {limit:,.0f} MiB that are left to a program"),
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
