"""Draws the figures of the documentation from the result files.

    python -m benchmarks.plots

Trainings: tokens per second of `flash-tf train` and of PyTorch against the context length, for each task. Decoding:
milliseconds a token and bytes of state. Recall: accuracy against bytes of state. Positions: perplexity along novels.
Claims: perplexity against tokens. A figure shows one device, and the newest row of each measurement. Rows of variants
are left out. The figures of the runs of `flash-tf train` are drawn by `flash-tf plot`.
"""

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from benchmarks import device, plot_style, recall, result_files
from benchmarks.result_files import Row

OUT = result_files.ROOT / "docs/images"
TASKS = {"lm": "causal language model", "mlm": "masked language model"}
CONFIG = re.compile(r"wikipedia_(m?lm)/(\w+)")  # of trainings on the same text and at the same size
PEERS = "PyTorch"  # the framework of other people's models
BEST = 3  # changes of a system in a figure of a claim
DECODING = (("ms_per_token", 1.0, "decoding time (ms per token)"), ("state_bytes", 2**-20, "state of one text (MiB)"))


def main(arguments: list[str] | None = None) -> int:
    """Writes all figures as PNG files; returns the exit status."""
    args = result_files.parse(_parser(), arguments)
    found = figures(args.results)
    if not found:
        raise ValueError(f"there is nothing to draw in {args.results}")
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for name, figure in found.items():
        file = Path(args.out, f"{name}.png")
        figure.savefig(file)
        print(file)
    return 0


def figures(folder: str | Path = result_files.FOLDER) -> dict[str, Figure]:
    """All figures of the result files in a folder, by file name without ending, such as `lm_throughput_h200`.

    Figures of times are of one device and named after it. What a model learns does not depend on the device.
    """
    read = lambda *names: [row for name in names for row in result_files.read(Path(folder, f"{name}.jsonl"))]  # noqa: E731
    timed = (
        (training_figures, _compared([*map(_training, read("train_command")), *read("peers")])),
        (decoding_figures, [row for row in read("decode") if "state_bytes" in row]),
    )
    found = {name: figure for draw, rows in timed for name, figure in _of_each_device(draw, rows).items()}
    found |= recall_figures([row for row in read("recall") if row["state_bytes"] is not None])
    return {**found, **position_figures(read("positions")), **claim_figures(read("claims"))}


def _of_each_device(draw: Callable[[list[Row]], dict[str, Figure]], rows: list[Row]) -> dict[str, Figure]:
    """`draw` of the rows of each device, named after it. Among several CPUs the one measured last counts."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.get("date", "")):
        groups.setdefault(slug(row["device"]), []).append(row)
    found = {}
    for name, group in groups.items():
        own = [row for row in group if row["device"] == group[-1]["device"]]
        found |= {f"{figure}_{name}": drawn for figure, drawn in draw(own).items()}
    return found


def slug(name: str) -> str:
    """A device's part of a file name: "h200" for "NVIDIA H200", "cpu" for any processor."""
    if name == "cpu" or re.search(r"\bcores? of\b", name):
        return "cpu"
    known = [one for one in device.PEAKS if one in name.replace("-", " ").split()]
    return known[0].lower() if known else re.sub(r"\W+", "_", name.lower()).strip("_")


class Series(NamedTuple):
    """One line in a figure of trainings: a model's name in results, and the framework that runs it."""

    model: str
    framework: str

    @property
    def label(self) -> str:
        """The text beside the line."""
        name = plot_style.MODELS.get(self.model, (self.model,))[0]
        return name if self.framework == "TensorFlow" else f"{name}, {self.framework}"


BASELINE = Series("transformer_plus_plus", PEERS)


def _series(row):
    return Series(row["model"], row["framework"])


def _training(row):
    """A row of `train_command` with the names that peers' rows have. A row of another config has no task."""
    task, model = found.groups() if (found := CONFIG.fullmatch(row.get("config") or "")) else (None, None)
    sizes = {"n": row.get("n"), "tokens": row.get("tokens_per_step")}
    return {**row, **sizes, "framework": "TensorFlow", "task": task, "model": model}


def _compared(rows):
    """The rows of the device and commit at which `BASELINE` was timed last. Others are no comparison."""
    rows = [row for row in rows if row["tokens"] == device.TOKENS and row["task"] in TASKS]
    last = next((row for row in reversed(rows) if _series(row) == BASELINE), None)
    return [row for row in rows if last and all(row[key] == last[key] for key in ("device", "commit"))]


def training_figures(rows: list[Row]) -> dict[str, Figure]:
    """Throughput and speed-up for each task, of rows of one device, commit and number of tokens."""
    rows = result_files.newest(rows, "task", "model", "framework", "n")
    found = {}
    for task in TASKS:
        own = [row for row in rows if row["task"] == task]
        if {row["framework"] for row in own} > {PEERS}:
            found |= _figures_of_task(task, own)
    return found


def _figures_of_task(task, rows):
    where = f"{TASKS[task]}, {rows[0]['tokens']:,} tokens per step, {rows[0]['device']}"
    rates = lines(rows, "tokens_per_second", 1e-3)
    base = rates.get(BASELINE, {})
    ratios = {one: {n: y / base[n] for n, y in points.items() if n in base} for one, points in rates.items()}
    ratios = {one: points for one, points in ratios.items() if points and one != BASELINE}
    title, ylabel = f"Throughput of training: {where}", "throughput (thousand tokens/s)"
    found = {f"{task}_throughput": _figure(rates, title, ylabel, _notes(rows))}
    if ratios:
        alone = sorted({n for points in rates.values() for n in points} - base.keys())
        said = [f"{BASELINE.label} was not measured at {', '.join(map(plot_style.short, alone))}."] if alone else []
        title, ylabel = f"Speed-up of training: {where}", f"speed-up over {BASELINE.label} (times)"
        found[f"{task}_speedup"] = _figure(ratios, title, ylabel, said + _notes(rows))
        found[f"{task}_speedup"].axes[0].axhline(1, color=plot_style.GREY, linewidth=1, label="_baseline")
    return found


def lines(rows: Sequence[Row], key: str, scale: float = 1.0) -> dict[Series, dict[int, float]]:
    """Each series' values of `key`, times `scale`, by context length. Rows without the key are left out."""
    found: dict[Series, dict[int, float]] = {}
    for row in sorted((row for row in rows if row.get(key) is not None), key=lambda row: row["n"]):
        found.setdefault(_series(row), {})[row["n"]] = scale * row[key]
    return found


def _figure(drawn, title, ylabel, small_print):
    figure, (axes,) = plot_style.figure(title)
    others = sorted({one.model for one in drawn if one.model not in plot_style.MODELS})
    for one, points in drawn.items():
        _, color = plot_style.look(one.model, others)
        style, fill = ("-", color) if one.framework == "TensorFlow" else ("--", "white")
        xy = (points.keys(), points.values())
        axes.plot(*xy, style, color=color, label=one.label, marker="o", markerfacecolor=fill, lw=1.8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(ylabel)
    plot_style.lengths_on_x(axes, {n for points in drawn.values() for n in points})
    plot_style.label_lines(axes)
    plot_style.notes(figure, small_print)
    return figure


def _notes(rows):
    """What was timed, at which commits, and what failed."""
    said = f"Rates of flash-tf train, and of torch.compile with fused attention. Commit: {_commits(rows)}."
    failed = [f"{_series(row).label} at {plot_style.short(row['n'])}: {row['error']}" for row in rows if "error" in row]
    return [said, *(["Not shown: " + "; ".join(failed) + "."] if failed else [])]


def _commits(rows):
    return ", ".join(sorted({row["commit"] for row in rows}))


def _devices(rows):
    return " and ".join(sorted({row["device"] for row in rows}))


def decoding_figures(rows: list[Row]) -> dict[str, Figure]:
    """`decode`: the newest comparison of models alone, for only rows of one command ran side by side."""
    commands: dict[tuple, list[Row]] = {}
    for row in rows:
        commands.setdefault(tuple(row.get(key) for key in ("commit", "date", "command")), []).append(row)
    comparisons = [group for group in commands.values() if len({row["model"] for row in group}) > 1]
    if not comparisons:
        return {}
    rows = result_files.newest(comparisons[-1], "model", "context")
    texts = f"{rows[0]['batch']} text{'s' * (rows[0]['batch'] > 1)}"
    figure, panels = plot_style.figure(f"Decoding {texts} at a time, {rows[0]['device']}", len(DECODING))
    names = list(dict.fromkeys(row["model"] for row in rows))
    for axes, (key, scale, label) in zip(panels, DECODING, strict=True):
        for name in names:
            points = sorted((row["context"], scale * row[key]) for row in rows if row["model"] == name)
            text, color = plot_style.look(name, [n for n in names if n not in plot_style.MODELS])
            axes.plot(*zip(*points, strict=True), color=color, label=text, marker="o", lw=1.8)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.set_ylabel(label)
        plot_style.lengths_on_x(axes, {row["context"] for row in rows})
        plot_style.label_lines(axes)
    plot_style.notes(figure, [f"Greedy, token by token; medians of calls that took turns. Commits: {_commits(rows)}."])
    return {"decode": figure}


def recall_figures(rows: list[Row]) -> dict[str, Figure]:
    """`recall_TASK`: a panel for each size of the task, and width, with a point for each of its systems."""
    rows, found = result_files.newest(rows, *recall.MEASURED), {}
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        kinds = [kind for kind, many in Counter(map(recall.size, of_task)).items() if many > 1]  # one compares nothing
        if not kinds:
            continue
        title = f"{task}: accuracy against the state of one text, {_devices(of_task)}"
        figure, panels = plot_style.figure(title, len(kinds))
        for axes, kind in zip(panels, kinds, strict=True):
            own = [row for row in of_task if recall.size(row) == kind]
            # In whole percent, and equal ones by their state: then the lines to the labels do not cross.
            for percent, state, name in sorted(
                (round(100 * r["accuracy"]), r["state_bytes"], r["system"]) for r in own
            ):
                label, color = plot_style.MODELS.get(name, (name, plot_style.GREY))
                axes.plot([state / 2**10], [percent], color=color, label=f"{label} {percent}%", marker="o", lw=0)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            size = recall.described(own[0], then="\n")  # in one line it would reach into the next panel
            axes.set_xlabel(f"state (KiB): {size}, width {own[0]['width']}")
            axes.set_ylabel("accuracy (%)")
            axes.set_ylim(-3, 103)
            plot_style.label_lines(axes, size=min(9.0, plot_style.FITTING / len(own)))
        plot_style.notes(figure, [f"The best learning rate of each system. Commits: {_commits(of_task)}."])
        found[f"recall_{task}"] = figure
    return found


def position_figures(rows: list[Row]) -> dict[str, Figure]:
    """`perplexity_by_position`: a line for each run, of the text and length that were read last."""
    rows = [row for row in rows if not row.get("variant")]
    rows = [row for row in rows if all(row[key] == rows[-1][key] for key in ("text", "tokens"))]
    rows = result_files.newest(rows, "run")
    if not rows:
        return {}
    models = [model_in(_of_claim(row["run"])[0]) for row in rows]
    figure, (axes,) = plot_style.figure(f"Stretches of {rows[0]['tokens']:,} tokens of novels, {_devices(rows)}")
    others = sorted(set(models) - plot_style.MODELS.keys())
    names = [_of_claim(row["run"]) for row in rows]
    for row, model, style, name in zip(rows, models, _styles(models), names, strict=True):
        (text, color), ends = plot_style.look(model, others), [end for _, end in row["buckets"]]
        system, *change = name
        named = change or system == model or models.count(model) == 1
        sizes = [f"{row['parameters'] / 1e6:.0f} M"] if names.count(name) > 1 else []  # of one system
        text = ", ".join([text, *change, *sizes]) if named else row["run"]
        axes.plot(ends, row["perplexity"], style, color=color, label=text, marker="o", ms=4, lw=1.8)
    for n in {row["n"] for row in rows}:
        axes.axvline(n, color=plot_style.GREY, linewidth=1, label="_trained")
    shown = [x for row in rows for x in row["perplexity"] if math.isfinite(x)]
    _perplexities_on_y(axes, min(shown), max(shown))
    plot_style.lengths_on_x(axes, {end for row in rows for _, end in row["buckets"]})
    axes.set_xlabel("position in the text (tokens): a point is the mean since the last one")
    plot_style.label_lines(axes)
    plot_style.notes(figure, [f"Vertical: the length of the training. Commits: {_commits(rows)}."])
    return {"perplexity_by_position": figure}


def claim_figures(rows: list[Row]) -> dict[str, Figure]:
    """`claim_NAME`: a panel for each length and task: the validation of each system and of its best changes.

    Runs that were timed on one device are also drawn against time. Of a claim about one system all changes are drawn.
    The first seed is drawn. A panel compares two lines or more.
    """
    rows = result_files.newest(rows, "claim", "task", "length", "tokens", "system", "change", "learning_rate", "seed")
    found = {}
    for claim in dict.fromkeys(row["claim"] for row in rows):
        own = [row for row in rows if row["claim"] == claim]
        own = [row for row in own if row["tokens"] == max(row["tokens"] for row in own)]  # others choose a rate
        own = [row for row in own if row["seed"] == min(row["seed"] for row in own)]
        lines = [(row["task"], row["length"]) for row in own]
        if not (kinds := sorted({kind for kind in lines if lines.count(kind) > 1}, key=lambda kind: kind[::-1])):
            continue
        own = [row for row in own if (row["task"], row["length"]) in kinds]
        panels = []
        for kind in kinds:
            of_kind = [row for row in own if (row["task"], row["length"]) == kind]
            panels.append((of_kind, "tokens (millions)", lambda row: 1e6))
            timed = [row for row in of_kind if row.get("tokens_per_second")]
            if len(timed) > 1 and len({row["device"] for row in timed}) == 1:
                panels.append((timed, "minutes of training steps", lambda row: 60 * row["tokens_per_second"]))
        figure, axes = plot_style.figure(f"{claim.replace('_', ' ')}, {_devices(own)}", len(panels))
        changed = False
        for panel, (drawn, unit, tokens) in zip(axes, panels, strict=True):
            changed |= _draw_claim(panel, drawn, tokens)
            panel.set_xlabel(f"{unit}: {TASKS[drawn[0]['task']]}, n = {drawn[0]['length']:,}")
        several = len({row["system"] for row in own}) > 1
        changes = f"up to {BEST} changes of each system, the best of those that end better" if several else "changes"
        dashed = f" Dashed: {changes}." if changed else ""
        said = f"Validation, one seed.{dashed}"
        plot_style.notes(figure, [f"{said} Commits: {_commits(own)}."])
        found[f"claim_{claim}"] = figure
    return found


def _draw_claim(axes, rows, tokens):
    """Draws a panel; returns whether it has changes of a system. `tokens(row)` are in one unit of the x axis."""
    ends = {row["system"]: row["perplexity"] for row in rows if row["change"] is None}
    better: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["perplexity"]):
        if row["change"] is not None and row["perplexity"] < ends.get(row["system"], math.inf):
            better.setdefault(row["system"], []).append(row)
    if len({row["system"] for row in rows}) > 1:
        rows = [row for row in rows if row["change"] is None or row in better.get(row["system"], [])[:BEST]]
    others = sorted({row["system"] for row in rows} - plot_style.MODELS.keys())
    for row in rows:
        text, color = plot_style.look(row["system"], others)
        changed = row["change"] is not None
        label = f"{row['perplexity']:.1f}  {', '.join([text, *([row['change']] if changed else [])])}"
        points = [(step * row["tokens_per_step"] / tokens(row), value) for step, value in row["curve"]]
        look = {"ls": "--", "lw": 0.9} if changed else {"ls": "-", "lw": 1.8}
        axes.plot(*zip(*points, strict=True), color=color, label=label, **look)
    _perplexities_on_y(
        axes, min(row["perplexity"] for row in rows), max(value for row in rows for _, value in row["curve"])
    )
    axes.set_xlim(left=0)
    plot_style.label_lines(axes, size=min(5.6, plot_style.FITTING / len(rows)))
    return any(row["change"] for row in rows)


def model_in(run: str) -> str:
    """The longest model name in the name of a run, such as `flash_quad` in `lm_flash_quad`; else the whole name."""
    named = [model for model in plot_style.MODELS if re.search(rf"(^|[^a-z]){model}($|[^a-z_])", run)]
    return max(named, key=len, default=run)


def _of_claim(run):
    """The system, and its change, in the name of a claim's run, such as `length-lm-flash-local_only-2048-45M-0.002-0`.

    A name of another form is all there is.
    """
    parts = re.fullmatch(r"\w+-m?lm-(\w+?)(?:-(\w+))?-\d+-\d+M-.*", run)
    return [run] if parts is None else [part for part in parts.groups() if part]


def _perplexities_on_y(axes, lowest, highest):
    axes.set_yscale("log")
    axes.set_ylim(lowest / 1.1, highest * 1.1)
    # A narrow range may hold one such number or none.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)) if highest > 2 * lowest else MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter("")
    axes.set_ylabel("perplexity (exp of the loss)")


def _styles(models):
    """A solid line for a model's first run, dashed and dotted ones for its others."""
    return [("-", "--", ":")[models[:i].count(model) % 3] for i, model in enumerate(models)]


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument("--results", default=result_files.FOLDER, metavar="DIR", help="default: benchmarks/results")
    parser.add_argument("--out", default=OUT, metavar="DIR", help="write the PNG files here (default: docs/images)")
    return parser


if __name__ == "__main__":
    device.program(main)
