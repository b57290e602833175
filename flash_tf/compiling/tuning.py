"""Times a few training steps per chunk size, of implementations and of models.

An implementation's chunk, the option `tile` of a mixer, changes the speed alone, so the fastest may be written into a
config. A model's chunk, `chunk_size`, is a part of the function: what another would cost is said, and nothing changed.
"""

import gc
import inspect
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from flash_tf import config as configs
from flash_tf.compiling import artifact, timing
from flash_tf.compiling.programs import Experiment
from flash_tf.layers.mixers import MIXERS
from flash_tf.models.language_model import listed
from flash_tf.profiling.operations import memory_of

TILE, CHUNK = "tile", "chunk_size"
SIZES = (16, 32, 64, 128, 256, 512)  # tried, up to the sequence's length


def tune(config: configs.Config, sizes: Sequence[int] | None, steps: int, report: Callable[[str], None]) -> dict:
    """Times the config's training step with each size.

    Args:
      config: The experiment.
      sizes: To try; None for powers of two up to the length.
      steps: Timed for each, 2 or more.
      report: Called with a line about what comes next.

    Returns:
      `option`, "tile" or "chunk_size"; `rows`, for each size its `size`, `median_ms`, `compile_s` and
      `program_bytes`, what XLA lays out for the step; `now`, the config's size; `fastest`.

    Raises:
      ValueError: The config's mixers have no chunk, or a size is none.
    """
    option, now = _option(config)
    n = config.data.sequence_length
    sizes = list(sizes or [size for size in SIZES if size <= n] or [n])
    if steps < 2 or min(sizes) < 1:
        raise ValueError(f"tune needs --steps >= 2 and sizes >= 1, got {steps} and {sorted(sizes)}")
    rows = []
    for size in sorted({*sizes, now}):
        report(f"{option} {size}: compiling, then {steps} steps")
        rows.append({"size": size, **_measure(_with(config, option, size), steps)})
        gc.collect()  # the model's memory, before the next one's
    fastest = min(rows, key=lambda row: row["median_ms"])["size"]
    return {"option": option, "now": now, "fastest": fastest, "sequence_length": n, "rows": rows}


def _option(config):
    """Which size the config's mixers have, and what it is."""
    for option in (TILE, CHUNK):
        for mixer in listed(config.model["mixer"]):
            if option in (parameters := inspect.signature(MIXERS.get(mixer["type"])).parameters):
                return option, mixer.get(option, parameters[option].default)
    names = ", ".join(dict.fromkeys(mixer["type"] for mixer in listed(config.model["mixer"])))
    raise ValueError(f"tune needs a mixer with a {TILE} or a {CHUNK}, and {names} has neither")


def _with(config, option, size):
    """The config with that size in every mixer that has the option."""
    values = configs.to_mapping(config)
    _set(values["model"], option, size)
    return configs.from_mapping(configs.Config, values, where="tune")


def _set(model: dict[str, Any], option, size):
    for mixer in listed(model["mixer"]):
        if option in inspect.signature(MIXERS.get(mixer["type"])).parameters:
            mixer[option] = size


def _measure(config, steps):
    experiment = Experiment(*artifact.prepare(config))
    timed = timing.time_steps(experiment, steps)
    return {
        "median_ms": statistics.median(timed.milliseconds),
        "compile_s": timed.compile_s,
        "program_bytes": memory_of(experiment.compiled_step(config.batch_size, config.data.sequence_length)),
    }


def write(path: str, size: int) -> None:
    """Writes a tile into a config file. Of its comments those stay that are lines of their own, at its top."""
    text = Path(path).read_text("utf-8")
    values = yaml.safe_load(text)
    model = values.setdefault("model", {})
    if not all("type" in mixer for mixer in listed(model.get("mixer", {}))):  # the base has it, or its type
        model["mixer"] = configs.to_mapping(configs.load(path))["model"]["mixer"]
    _set(model, TILE, size)
    head = [line for line in text.splitlines(keepends=True) if line.startswith("#")]
    partial = Path(f"{path}.partial")
    partial.write_text("".join(head) + yaml.safe_dump(values, sort_keys=False), "utf-8")
    partial.replace(path)


def as_text(found: dict) -> str:
    """`tune`'s result as a table for people."""
    best = next(row["median_ms"] for row in found["rows"] if row["size"] == found["fastest"])
    lines = [f"{found['option']:<12}{'ms a step':>12}{'over best':>12}{'memory':>14}"]
    for row in found["rows"]:
        mark = " (now)" if row["size"] == found["now"] else ""
        memory = f"{row['program_bytes'] / 2**20:,.0f} MiB"
        lines.append(f"{row['size']:<12}{row['median_ms']:>12.1f}{row['median_ms'] / best:>12.2f}{memory:>14}{mark}")
    return "\n".join(lines)
