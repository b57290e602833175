"""Times a few training steps for each block size of an implementation, or for each chunk size of a model.

A mixer's `block_size` changes only the speed, so `write` can put the fastest into a config. A model's `chunk_size` is
part of its function: `tune` reports the cost of other sizes, and changes nothing.
"""

import gc
import inspect
import math
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from flash_tf import config as configs
from flash_tf import model_stats, renamed, strict_yaml
from flash_tf.compiling import artifact, timing
from flash_tf.compiling.programs import Experiment
from flash_tf.layers.mixers import MIXERS
from flash_tf.profiling.operations import memory_of
from flash_tf.registry import listed
from flash_tf.training import modelling
from flash_tf.training.preflight import check_kernels

BLOCK, CHUNK = "block_size", "chunk_size"
SIZES = (16, 32, 64, 128, 256, 512)  # the default candidates, up to the sequence length


def tune(config: configs.Config, sizes: Sequence[int] | None, steps: int, report: Callable[[str], None]) -> dict:
    """Times the config's training step with each size.

    Args:
      config: The experiment.
      sizes: The sizes to try; None for powers of two up to the sequence length.
      steps: Timed steps for each size, 2 or more.
      report: Called with a line before each size.

    Returns:
      `option`, "block_size" or "chunk_size"; `rows`, for each size its `size`, `median_ms`, `least_ms`, `compile_s`
      and `program_bytes`, the step's memory by XLA; `now`, the config's size; `fastest`, see `faster`.

    Raises:
      ValueError: The config's mixers have no such option, or a size is not valid.
    """
    modelling.with_masking(config)  # that each mixer is one
    option, now = _option(config)
    n = config.data.sequence_length
    sizes = list(sizes or [size for size in SIZES if size <= n] or [n])
    if steps < 2 or min(sizes) < 1:
        raise ValueError(f"tune needs --steps >= 2 and sizes >= 1, got {steps} and {sorted(sizes)}")
    for size in (now, *sizes):  # all of them before any work
        sized = modelling.with_masking(_with(config, option, size))
        with model_stats.without_weights():
            check_kernels(sized, modelling.make_model(sized))
    rows = []
    for size in sorted({*sizes, now}):
        report(f"{option} {size}: compiling, then {steps} steps")
        rows.append({"size": size, **_measure(_with(config, option, size), steps)})
        gc.collect()  # frees this model before the next one is made
    return {"option": option, "now": now, "fastest": faster(rows, now), "sequence_length": n, "rows": rows}


def faster(rows: list[dict], now: int) -> int:
    """The size with the least median, if every step of size `now` took longer than that; else `now`."""
    best, before = min(rows, key=lambda row: row["median_ms"]), next(row for row in rows if row["size"] == now)
    return best["size"] if best["median_ms"] < before["least_ms"] else now


def _option(config):
    """The name of the size that the config's mixers have, and its value."""
    for option in (BLOCK, CHUNK):
        sizes = {
            mixer.get(option, inspect.signature(MIXERS.get(mixer["type"])).parameters[option].default)
            for mixer in listed(config.model["mixer"])
            if _has(mixer, option)
        }
        if len(sizes) > 1:
            said = " and ".join(map(str, sorted(sizes)))
            raise ValueError(f"tune gives all mixers one {option}, and they have {said}: set one first")
        if sizes:
            return option, sizes.pop()
    names = ", ".join(dict.fromkeys(mixer["type"] for mixer in listed(config.model["mixer"])))
    raise ValueError(f"tune needs a mixer with a {BLOCK} or a {CHUNK}, and {names} has neither")


def _with(config, option, size):
    """The config with this size in every mixer that has the option."""
    values = {**configs.to_mapping(config), "init_from": None}  # which changes no time
    _set(values["model"], option, size)
    return configs.from_mapping(configs.Config, values, where="tune")


def _set(model: dict[str, Any], option, size):
    for mixer in listed(model["mixer"]):
        if _has(mixer, option):
            mixer[option] = size


def _has(mixer, option):
    return option in inspect.signature(MIXERS.get(mixer["type"])).parameters


def _measure(config, steps):
    experiment = Experiment(*artifact.resolve(config))
    timed = timing.time_steps(experiment, steps)
    return {
        "median_ms": statistics.median(timed.milliseconds),
        "least_ms": min(timed.milliseconds),
        "compile_s": timed.compile_s,
        "program_bytes": memory_of(experiment.compiled_step(config.batch_size, config.data.sequence_length)),
    }


def write(path: str, size: int) -> None:
    """Writes a block size into a config file, and changes nothing else in its text."""
    file = Path(path).resolve()  # a link stays one
    with file.open(encoding="utf-8", newline="") as opened:  # ends of lines stay as they are
        text = opened.read()
    mixer = configs.to_mapping(configs.load(path))["model"]["mixer"]  # with the base's options
    model = _child(yaml.compose(text), "model")
    node = _child(model, "mixer")
    if node is None:  # the mixer is in the base
        whole = {"mixer": mixer}
        _set(whole, BLOCK, size)
        option = yaml.safe_dump(whole, default_flow_style=True, width=math.inf).strip()[1:-1]
        edits = [_added(model, option)] if model else [(len(text), len(text), f"\nmodel:\n  {option}\n")]
    else:
        nodes = {id(one): (one, kind) for one, kind in zip(_items(node), listed(mixer), strict=True)}.values()
        edits = [_edit(one, size) for one, kind in nodes if _has(kind, BLOCK)]
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    _check(text, mixer, size, path)
    partial = Path(f"{file}.partial")
    partial.write_text(text, "utf-8", newline="")
    shutil.copymode(file, partial)
    partial.replace(file)


def _check(text, mixer, size, path):
    """Raises a ValueError unless an edited text is YAML whose mixers have the block size."""
    try:
        found = zip(listed(strict_yaml.load(text, path)["model"]["mixer"]), listed(mixer), strict=True)
        right = all(one[BLOCK] == size for one, kind in found if _has(kind, BLOCK))
    except (ValueError, KeyError, TypeError):
        right = False
    if not right:
        raise ValueError(f"tune cannot edit the form of {path}: put {BLOCK}: {size} into its mixer by hand")


def _child(node, name):
    """The value under a key of a YAML mapping, or None."""
    return next((value for key, value in node.value if key.value == name), None) if node else None


def _items(node):
    return node.value if isinstance(node, yaml.SequenceNode) else [node]


def _edit(node, size):
    """The edit that sets a mixer's block size: start and end of the old text, and the new text."""
    for key, old in node.value:
        if renamed.OPTIONS.get(key.value, key.value) == BLOCK:
            return key.start_mark.index, old.end_mark.index, f"{BLOCK}: {size}"
    return _added(node, f"{BLOCK}: {size}")


def _added(node, option):
    """The edit that adds an option before the first of a mapping."""
    if not node.value:
        return node.start_mark.index, node.end_mark.index, f"{{{option}}}"
    first = node.value[0][0].start_mark
    return first.index, first.index, option + (", " if node.flow_style else "\n" + " " * first.column)


def as_text(found: dict) -> str:
    """The result of `tune` as a table for people."""
    best = min(row["median_ms"] for row in found["rows"])
    lines = [f"{found['option']:<12}{'ms a step':>12}{'over best':>12}{'memory':>14}"]
    for row in found["rows"]:
        mark = " (now)" if row["size"] == found["now"] else ""
        memory = f"{row['program_bytes'] / 2**20:,.0f} MiB"
        lines.append(f"{row['size']:<12}{row['median_ms']:>12.1f}{row['median_ms'] / best:>12.2f}{memory:>14}{mark}")
    return "\n".join(lines)
