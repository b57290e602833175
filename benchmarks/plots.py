"""Draws the results of benchmarks, and of training runs, as PNG files.

    python -m benchmarks.plots results/train_step.json results/peers.json --out plots
    python -m benchmarks.plots runs/lm-flash "FLASH, high rate=runs/lm-flash-2" runs/lm-flash_quad --out plots

A file holds rows of training steps: of benchmarks.train_step, benchmarks.peers or benchmarks.run_compiled, whose rows
of decoding are left out; or runs, of benchmarks.learning; or decoding, of benchmarks.decode. A directory is that of a
training run, and may be given a label.
"""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import device

NEEDED = ("task", "model", "n", "tokens")


def main(arguments: list[str] | None = None) -> int:
    """Draws all that the files hold; returns the exit status."""
    args = _parser().parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("it needs matplotlib: pip install matplotlib")
    for name, figure in draw(args.paths).items():
        file = Path(args.out, f"{name}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)
        print(file)
    return 0


def draw(paths: Sequence[str]) -> dict[str, Any]:
    """The figures of result files and of runs, by file name without ending.

    Raises:
      ValueError: When there is nothing to draw, or what there is cannot be compared.
    """
    from benchmarks import plot_curves, plot_decoding, plot_steps

    rows, runs, decoded = [], [], []
    for path in paths:
        label, _, place = path.rpartition("=")
        if Path(place).is_dir():
            runs.append(plot_curves.read(place, label or None))
        elif Path(path).is_file() and '"benchmark": "learning"' in Path(path).read_text():
            runs += plot_curves.of_learning(path)
        elif Path(path).is_file() and '"benchmark": "decode"' in Path(path).read_text():
            decoded += read(path, ("model", "context", "batch", "ms_per_token", "state_bytes"))
        else:
            rows += read(path)
    figures = plot_steps.figures(rows) | plot_curves.figures(runs) | plot_decoding.figures(decoded)
    if not figures:
        raise ValueError(f"there is nothing to draw in {', '.join(paths)}")
    return figures


def read(path: str, needed: Sequence[str] = NEEDED) -> list[dict[str, Any]]:
    """The rows of a result file, each with the device and the commit of the whole; a file may be one row.

    Raises:
      ValueError: When rows lack what is needed.
    """
    try:
        result = json.loads(Path(path).read_text())
        rows = result.get("rows", [result])
        shared = {"framework": "TensorFlow", **{name: result[name] for name in ("device", "commit")}}
        rows = [{**shared, **row} for row in rows if needed != NEEDED or row.get("program") != "decode"]
        for row in rows:
            if missing := [name for name in needed if name not in row]:
                raise KeyError(missing[0])
            row["task"] = device.TASKS.get(row.get("task"), row.get("task"))
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError):
        raise ValueError(f"{path} is no result file: it holds no JSON object") from None
    except KeyError as error:
        raise ValueError(f"{path} is no result of training steps: it lacks {error}") from None
    return rows


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", metavar="RESULT", help="a JSON file, or [LABEL=]DIRECTORY of a run")
    parser.add_argument("--out", required=True, metavar="DIR", help="where the PNG files go")
    return parser


if __name__ == "__main__":
    device.program(main)
