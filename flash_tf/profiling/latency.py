"""What a capture says: how long a step takes, what it waits for, what costs most."""

import dataclasses
import json
import statistics

import numpy as np
import tensorflow as tf

from flash_tf.profiling.trace import Trace

LATENCY = "latency.json"
PARTS = ("total", "device", "host", "input")
COSTLIEST = 10
# Input is prepared while a step runs, so a step that waits for it at all is faster than it; less is a hiccup.
WAITING = 0.1

WORDS = {
    "device": "as the device reports it",
    "XLA": "of the largest program, by XLA's analysis",
    "XLA, of a program not run": "by XLA's analysis of forward and backward, had it compiled them",
}
UNKNOWN = "not reported by this device, and the step is no program of XLA's"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a step does, and on what.

    Attributes:
      mode: "train", "prefill" or "decode".
      model: What is profiled, to read.
      tokens: Of a step, over all replicas.
      flops: Model FLOPs of a step, over all replicas.
      replicas: That share this process's devices.
      device: Name of one of them.
      peak: FLOP/s of all replicas together; None where unknown.
      peak_of: Whose, to read: a datasheet's, or measured.
      rows: Texts that are decoded together; None in other modes.
    """

    mode: str
    model: str
    tokens: int
    flops: int
    replicas: int
    device: str
    peak: float | None
    peak_of: str
    rows: int | None = None


def summarize(trace: Trace, work: Work, peaks: dict[int, int], program_bytes: int | None = None) -> dict:
    """The figures of a capture, for `latency.json`.

    Args:
      trace: What was captured.
      work: What a step does.
      peaks: Step -> most bytes that a device held, where devices say so.
      program_bytes: Peak of the step as a program, where neither devices nor the trace say; None if unknown.

    Returns:
      Of every step `total_ms`, `device_ms`, `host_ms` and `input_ms`, which add up, and `peak_bytes`; their `median`
      and 90th percentile; rates by the median; the largest `peak_bytes`, and whose word it is; the costliest
      operations, of one replica, with their share of all.
    """
    steps = [_step(step, peaks.get(step.number)) for step in trace.steps]
    named = [f"{part}_ms" for part in PARTS]
    columns = {name: [step[name] for step in steps] for name in named}
    totals = {name: sum(column) for name, column in columns.items()}
    seconds = statistics.median(columns["total_ms"]) / 1e3
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
        "median": {name: statistics.median(column) for name, column in columns.items()},
        "p90": {name: float(np.quantile(column, 0.9)) for name, column in columns.items()},
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
    if work.rows is not None:
        result["ms_per_token"] = 1e3 * seconds * work.rows / work.tokens
    return result


def _step(step, peak):
    times = {f"{part}_ms": getattr(step, part) / 1e9 for part in PARTS}
    return {"step": step.number, **times, "peak_bytes": peak}


def _bound(totals):
    """What a step is bound by, in a word."""
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
    """Writes `latency.json` into the folder; returns its path."""
    path = f"{folder}/{LATENCY}"
    with tf.io.gfile.GFile(path, "w") as file:
        file.write(json.dumps(result, indent=1) + "\n")
    return path


def headline(result: dict) -> str:
    """The result in a line."""
    mfu = "" if result["mfu"] is None else f", MFU {result['mfu']:.1%}"
    waits = f"waiting for input {result['input_share']:.1%}"
    return f"{result['median']['total_ms']:,.2f} ms a step, {result['bound']}-bound, {waits}{mfu}"


def as_text(result: dict) -> str:
    """The result as tables for people."""
    r = result
    times = [f"{len(r['steps'])} steps".ljust(20) + "".join(f"{part:>13}" for part in PARTS)]
    times += [name.ljust(20) + "".join(f"{r[name][f'{p}_ms']:>10,.2f} ms" for p in PARTS) for name in ("median", "p90")]
    rate = f"{_si(r['flops_per_second'])}FLOP/s of the model's own, {_si(r['model_flops_per_step'])}FLOP a step"
    mfu = f"{r['mfu']:.1%} of {_si(r['peak_flops_per_second'])}FLOP/s, {r['peak_of']}" if r["mfu"] else "no peak known"
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
