"""How steady the gradients of runs are: the relative standard deviation of their norm over the steps.

    python -m benchmarks.gradient_stability "1 + elu=runs/one_plus_elu" "NormAttention=runs/norm_attention"

TransNormer (arXiv:2210.10340, Table 2) prints this number to show that a denominator makes gradients unsteady: 0.25 for
a Transformer, 0.58 for 1 + elu, 0.47 for Performer and 0.20 for its own attention. The number is the standard deviation
of the gradient's norm over the steps, divided by the mean. The norm is taken before clipping. The script reads the
records of `flash-tf train`.
"""

import argparse

import numpy as np

from benchmarks import device, result_files
from flash_tf.pictures import records

WIDTHS = (28, 10, 12, 12, 10)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table, in the order of the runs."""
    args = result_files.parse(_parser(), arguments)
    if args.first < 1:
        raise ValueError(f"--from must be 1 or more, got {args.first}")
    rows = [spread(run, args.first) for run in records.read_all(args.runs)]
    results = result_files.Results(args, "gradient_stability", device=args.device, packages=("numpy",))
    print(device.table_line(("run", "steps", "mean |g|", "deviation", "relative"), WIDTHS))
    for row in rows:
        results.add(row)
        numbers = (f"{row[name]:.4g}" for name in ("mean", "deviation"))
        print(device.table_line((row["run"], row["steps"], *numbers, f"{row['relative']:.2f}"), WIDTHS))
    return 0


def spread(run: records.Run, first: int) -> dict:
    """Mean, standard deviation and their ratio of a run's gradient norms from step `first` on.

    Raises:
      ValueError: Fewer than two steps were recorded from there on, or one has no finite norm above zero.
    """
    norms, steps = run.gradient_norm[run.steps >= first], run.steps[run.steps >= first]
    if len(norms) < 2:
        raise ValueError(f"{run.folder} needs two recorded steps or more from step {first} on, has {len(norms)}")
    if len(wrong := steps[~(np.isfinite(norms) & (norms > 0))]):
        raise ValueError(f"{run.folder}: the gradient of step {wrong[0]:,} needs a finite norm above zero")
    mean, deviation = float(np.mean(norms)), float(np.std(norms))
    row = {"run": run.label, "folder": run.folder, "steps": len(norms), "first": first}
    return {**row, "mean": mean, "deviation": deviation, "relative": deviation / mean}


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gradient_stability", description=__doc__.splitlines()[0]
    )
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN")
    parser.add_argument(
        "--from", dest="first", type=int, default=1, metavar="STEP", help="leave out the steps before this one"
    )
    parser.add_argument("--device", default="unknown", help="the device of the runs, for the rows")
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
