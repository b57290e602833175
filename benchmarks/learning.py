"""Trains exported steps on one token file: a sweep of learning rates, then the best one for longer.

    python -m benchmarks.learning lm_flash lm_flash_quad --tokens train.npy --validation validation.npy --out runs \
        --learning-rates 5e-4 1e-3 2e-3

Each artifact is compiled once. Each run of the sweep reads the tokens once. The best learning rate then reads them
`--passes` times. Each run warms up and decays over its own length, as the config says. It needs NumPy and JAX alone.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from benchmarks import device as devices
from benchmarks import result_files
from benchmarks.run_compiled import option
from flash_tf.compiling import manifest as manifests
from flash_tf.training.progress import Progress

POINTS = 100  # kept of a training curve, each the mean of the steps since the last


def main(arguments: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    args = result_files.parse(_parser(), arguments)
    artifacts = {path: manifests.read(path) for path in args.artifacts}
    options = dict(option(text) for text in args.xla_option)
    with devices.libraries_in_log() as console:
        import jax

        jax.config.update("jax_enable_x64", True)  # TensorFlow counts steps in int64
        device, progress = jax.devices()[0], Progress(console)
        packages = ("jax", "jaxlib", "numpy")
        results = result_files.Results(args, "learning", device=device.device_kind, packages=packages)
        for path, artifact in artifacts.items():
            learner = _Learner(path, artifact, args, device, options, progress)
            for rate in args.learning_rates:
                results.add(learner.train(rate, passes=1))
            swept = [row for row in results.rows if row["artifact"] == learner.name and "error" not in row]
            if swept and args.passes > 1:
                best = min(swept, key=lambda row: row["validation_loss"])
                results.add(learner.train(best["learning_rate"], passes=args.passes))
    return 0


class _Learner:
    """One artifact, compiled, with its data."""

    def __init__(self, path, artifact, args, device, options, progress):
        from benchmarks.compiled_data import Stream, read_tokens
        from benchmarks.compiled_program import Compiled, memory_errors
        from benchmarks.compiled_run import fingerprint
        from benchmarks.compiled_timing import prove

        self.name = Path(path).name
        self._path, self._artifact, self._args, self._device, self._progress = path, artifact, args, device, progress
        files = {"tokens": args.tokens, "validation": args.validation}
        splits = {name: np.asarray(read_tokens(file, artifact.vocabulary_size)) for name, file in files.items()}
        self._steps_per_pass = len(splits["tokens"]) // artifact.programs["step"].tokens
        if self._steps_per_pass < 2:
            tokens, needed = len(splits["tokens"]), 2 * artifact.programs["step"].tokens
            raise ValueError(f"a pass needs two steps, {needed:,} tokens; {args.tokens} has {tokens:,}")
        self._about = {name: fingerprint(x) for name, x in splits.items()}
        self._streams = {name: Stream(x, artifact, pad_last=name != "tokens") for name, x in splits.items()}
        for rate in args.learning_rates:  # so that a run that cannot begin fails before minutes of compiling
            self._open(rate, 1)
        progress.line(f"compiling {path} for {device.device_kind}")
        with memory_errors(device, path):
            prove(path, artifact, device, options)
            self._step, self._forward = (
                Compiled(path, artifact.programs[name], device, options) for name in ("step", "forward")
            )

    def train(self, rate: float, passes: int) -> dict:
        """One run; returns its row. If the loss became NaN or infinite, the row has the error."""
        from benchmarks.compiled_program import memory_errors
        from benchmarks.compiled_run import LOSSES
        from benchmarks.compiled_training import DivergenceError, Plan, Training

        rates, folder = self._open(rate, passes)
        out, steps = folder.path, rates.steps
        self._progress.line(f"{out}: {steps:,} steps at a learning rate of {rate:g}")
        training = Training(
            self._artifact, self._step, self._forward, device=self._device, rates=rates, folder=folder,
            progress=self._progress,
        )  # fmt: skip
        plan = Plan(steps=steps, save_every=steps, evaluate_every=self._steps_per_pass, shard_bytes=2**30)
        row = {"artifact": self.name, "learning_rate": rate, "passes": passes}
        try:
            with memory_errors(self._device, self._path):
                training.run(self._streams["tokens"], self._streams["validation"], plan)
        except DivergenceError as error:
            self._progress.line(f"{out}: {error}")
            return {**row, "error": str(error)}
        return row | self._record(folder.path, LOSSES)

    def _open(self, rate, passes):
        from benchmarks.compiled_run import RunFolder, Schedule

        overrides = [f"optimizer.learning_rate={rate}", f"train.steps={passes * self._steps_per_pass}"]
        rates = Schedule(self._artifact, overrides)
        return rates, RunFolder(f"{self._args.out}/{self.name}-{rate:g}-{passes}", self._path, rates, self._about)

    def _record(self, path, losses):
        from benchmarks.compiled_run import EVALUATIONS

        rows = [json.loads(line) for line in (path / losses).read_text().splitlines()]
        evaluations = [json.loads(line) for line in (path / EVALUATIONS).read_text().splitlines()]
        program, half = self._step.program, len(rows) // 2
        per_step = (rows[-1]["seconds"] - rows[half]["seconds"]) / (len(rows) - 1 - half)
        return {
            "task": self._artifact.config["model"]["type"],
            "n": program.tokens // program.batch_size,
            "tokens_per_step": program.tokens,
            "steps": rows[-1]["step"],
            "seconds": rows[-1]["seconds"],
            "tokens_per_second": program.tokens / per_step,
            "validation_loss": evaluations[-1]["loss"],
            "validation_perplexity": evaluations[-1]["perplexity"],
            "evaluations": evaluations,
            "curve": _thinned(rows),
        }


def _thinned(rows):
    """A run's curve as columns: the last step of each of equal parts, its seconds, and the part's mean loss."""
    parts = np.array_split(np.arange(len(rows)), min(POINTS, len(rows)))
    last = [rows[part[-1]] for part in parts]
    means = [round(float(np.mean([rows[i]["loss"] for i in part])), 6) for part in parts]
    return {"step": [row["step"] for row in last], "seconds": [row["seconds"] for row in last], "loss": means}


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__.splitlines()[0])
    parser.add_argument("artifacts", nargs="+", metavar="ARTIFACT", help="a folder that `flash-tf compile --out` wrote")
    parser.add_argument("--tokens", required=True, metavar="FILE.npy", help="the training split")
    parser.add_argument("--validation", required=True, metavar="FILE.npy", help="the validation split")
    parser.add_argument("--out", required=True, metavar="DIR", help="keep the runs here, one folder for each")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3], metavar="RATE")
    parser.add_argument("--passes", type=int, default=4, help="times that the last run reads the tokens (default 4)")
    parser.add_argument(
        "--xla-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of XLA's compiler; may be repeated",
    )
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    devices.program(main)
