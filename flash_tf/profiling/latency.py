"""The figures of a capture: a step's time, its waits, its costliest operations."""

import dataclasses
import json
import statistics

import numpy as np

from flash_tf import owned_files
from flash_tf.profiling.trace import Trace

WRITER, LATENCY = "flash-tf profile", "latency.json"
TIMES = ("total", "device", "host", "input")
COSTLIEST = 10
# Input is made while a step runs. A step that waits for a larger share than this is input-bound; less is noise.
WAITING = 0.1

WORDS = {
    "device": "by the device",
    "XLA": "of the largest program, by XLA's analysis",
    "XLA, of a program not run": "by XLA's analysis of forward and backward, if it compiled them",
}
UNKNOWN = "unknown: the device does not report it, and XLA did not compile the step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a step, and its devices.

    Attributes:
      mode: "train", "prefill" or "decode".
      model: The model's name for people.
      tokens: Tokens of a step, over all replicas.
      flops: Model FLOPs of a step, over all replicas.
      replicas: Replicas on this process's devices.
      device: Name of one device.
      peak: FLOP/s of all replicas together; None if unknown.
      peak_of: The source of `peak` for people: a datasheet, or a measurement.
      batch_size: Texts that the model decodes together; None in other modes.
    """

    mode: str
    model: str
    tokens: int
    flops: int
    replicas: int
    device: str
    peak: float | None
    peak_of: str
    batch_size: int | None = None


def summarize(
    trace: Trace,
    work: Work,
    peaks: dict[int, int],
    program_bytes: int | None = None,
    untraced: float | None = None,
) -> dict:
    """The figures of a capture, for `latency.json`.

    Args:
      trace: The captured steps.
      work: The work of a step.
      peaks: Step -> the most bytes that a device held; empty if no device reports it.
      program_bytes: Peak memory of the step as a program, if neither devices nor the trace report it; None if unknown.
      untraced: The mean time of a step without the profiler, in ms; None if it was not measured.

    Returns:
      For every step `total_ms`, the sum of `device_ms`, `host_ms` and `input_ms`, and `peak_bytes`; their `median` and
      90th percentile; the mean times `untraced`, without the profiler's cost; shares and rates by those, or else by the
      sums and the median; the largest `peak_bytes` and its source; the costliest operations of one replica, with their
      share of all.
    """
    steps = [_step(step, peaks.get(step.number)) for step in trace.steps]
    named = [f"{time}_ms" for time in TIMES]
    columns = {name: [step[name] for step in steps] for name in named}
    median = {name: statistics.median(column) for name, column in columns.items()}
    totals = {name: sum(column) for name, column in columns.items()}
    own = None if untraced is None else _without_profiler({n: x / len(steps) for n, x in totals.items()}, untraced)
    totals = own or totals
    seconds = (own or median)["total_ms"] / 1e3
    peak = work.peak or (trace.peak and trace.peak * work.replicas)
    held, by = program_bytes, "XLA, of a program not run" if program_bytes else None
    if trace.program_bytes:
        held, by = trace.program_bytes, "XLA"
    if peaks:
        held, by = max(peaks.values()), "device"
    result = {
        "mode": work.mode,
        "model": work.model,
        "device": work.device,
        "replicas": work.replicas,
        "bound": _bound(totals),
        "device_share": totals["device_ms"] / totals["total_ms"],
        "input_share": totals["input_ms"] / totals["total_ms"],
        "median": median,
        "p90": {name: float(np.quantile(column, 0.9)) for name, column in columns.items()},
        "untraced": own,
        "tokens_per_step": work.tokens,
        "tokens_per_second": work.tokens / seconds,
        "model_flops_per_step": work.flops,
        "flops_per_second": work.flops / seconds,
        "peak_flops_per_second": peak,
        "peak_of": work.peak_of if work.peak else "the device's own figure" if peak else None,
        "mfu": work.flops / seconds / peak if peak else None,
        "peak_bytes": held,
        "peak_bytes_by": by,
        "operations": _costliest(trace, work),
        "steps": steps,
    }
    if work.batch_size is not None:
        result["ms_per_token"] = 1e3 * seconds * work.batch_size / work.tokens
    return result


def _step(step, peak):
    times = {f"{time}_ms": getattr(step, time) / 1e9 for time in TIMES}
    return {"step": step.number, **times, "peak_bytes": peak}


def _without_profiler(mean, total):
    """The mean times of steps that take `total` ms. The profiler costs the host time; if that is not enough, all."""
    host = max(0.0, mean["host_ms"] + total - mean["total_ms"])
    parts = {"device_ms": mean["device_ms"], "host_ms": host, "input_ms": mean["input_ms"]}
    share = total / sum(parts.values())
    return {"total_ms": total, **{name: part * share for name, part in parts.items()}}


def _bound(totals):
    """The resource that bounds a step, in a word."""
    if totals["input_ms"] > WAITING * totals["total_ms"]:
        return "input"
    return "compute" if totals["device_ms"] >= totals["host_ms"] else "host"


def _costliest(trace, work):
    whole = sum(time for _, time in trace.operations.values())
    runs = len(trace.steps) * (trace.devices or work.replicas)
    rows = sorted(trace.operations.items(), key=lambda row: -row[1][1])[:COSTLIEST]
    return [
        {
            "operation": what,
            "kind": kind,
            "count": round(count / runs, 2),
            "ms": time / runs / 1e9,
            "share": time / max(whole, 1),
        }
        for (what, kind), (count, time) in rows
    ]


def write(result: dict, folder: str) -> str:
    """Writes `latency.json` into the folder. Returns its path.

    Raises:
      ValueError: The folder holds another file of this name.
    """
    owned_files.write(folder, {LATENCY: (json.dumps(result, indent=1) + "\n").encode()}, WRITER, _older)
    return f"{folder}/{LATENCY}"


def check_folder(folder: str) -> None:
    """Raises a ValueError if the folder holds another file where `write` would put its own."""
    owned_files.check(folder, [LATENCY], WRITER, _older)


def _older(folder):
    """`latency.json` from before there were manifests, by its keys."""
    return (
        [LATENCY]
        if {"mode", "bound", "median", "p90", "steps"} <= owned_files.json_of(f"{folder}/{LATENCY}").keys()
        else []
    )


def headline(result: dict) -> str:
    """The result in one line."""
    mfu = "" if result["mfu"] is None else f", MFU {result['mfu']:.1%}"
    total = (result["untraced"] or result["median"])["total_ms"]
    return f"{total:,.2f} ms a step, {result['bound']}-bound, waiting for input {result['input_share']:.1%}{mfu}"


def as_text(result: dict) -> str:
    """The result as tables for people."""
    r = result
    times = [f"{len(r['steps'])} steps".ljust(20) + "".join(f"{time:>13}" for time in TIMES)]
    for name in ("median", "p90", *["untraced"] * (r["untraced"] is not None)):
        times.append(name.ljust(20) + "".join(f"{r[name][f'{time}_ms']:>10,.2f} ms" for time in TIMES))
    rate = f"{_si(r['flops_per_second'])}FLOP/s of the model, {_si(r['model_flops_per_step'])}FLOP a step"
    mfu = f"{r['mfu']:.1%} of {_si(r['peak_flops_per_second'])}FLOP/s, {r['peak_of']}" if r["mfu"] else "unknown peak"
    waits = f"{r['input_share']:.1%} waits for input"
    memory = f"{r['peak_bytes'] / 2**20:,.1f} MiB, {WORDS[r['peak_bytes_by']]}" if r["peak_bytes"] else UNKNOWN
    rows = [
        (r["mode"], f"{r['model']}, {r['replicas']} x {r['device']}"),
        ("verdict", f"{r['bound']}-bound: devices work {r['device_share']:.1%} of the step, {waits}"),
        ("tokens", f"{r['tokens_per_second']:,.0f} a second, {r['tokens_per_step']:,} a step"),
        ("achieved", rate),
        ("MFU", mfu),
        ("peak memory", memory),
    ]
    if "ms_per_token" in r:
        rows.insert(2, ("latency", f"{r['ms_per_token']:,.3f} ms a token"))
    operations = ["   share  ms a step   times  operation"]
    for row in r["operations"]:
        what = f"{row['operation']} ({row['kind']})" if row["kind"] != row["operation"] else row["operation"]
        operations.append(f"{row['share']:8.1%}  {row['ms']:9.3f}  {row['count']:6,g}  {what}")
    lines = [f"{name:<20}{value}" for name, value in rows]
    return "\n".join([lines[0], "", *times, "", *lines[1:], "", *operations])


def _si(x):
    """A number with its prefix: 1.25e9 -> `1.25 G`."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if x >= size:
            return f"{x / size:,.2f} {prefix}"
    return f"{x:,.0f} "
