"""Every system at one small size: parameters, time of a training step at two lengths, bytes of a decoding state.

    python -m benchmarks.systems --json benchmarks/results/systems_cpu.json
    python -m benchmarks.systems --json benchmarks/results/systems_cpu.json --learning learning.json

In TensorFlow, on the device at hand, 4,096 tokens a step. Rows that the file has are kept, so that it may be stopped
and started again. It ends with the table in Markdown, with perplexities where `benchmarks.learning` trained the same
configs, exported under their names.
"""

import argparse
import json
import statistics
from pathlib import Path

from benchmarks import device
from flash_tf.training.progress import Progress

LENGTHS = (512, 4096)
OF_LENGTH = ("cosine_length", "max_length")  # constants of mixers that must be no less than the length


def main(arguments: list[str] | None = None) -> int:
    """Measures what the file lacks, and prints the table."""
    args = _parser().parse_args(arguments)
    learned = [row for file in args.learning for row in json.loads(Path(file).read_text())["rows"]]
    with device.libraries_in_log("systems") as console:
        from benchmarks import backends
        from flash_tf import config, model_zoo

        names = [name for name in config.names() if name.partition("/")[0] in model_zoo.FOLDERS]
        if unknown := sorted(set(args.only or names) - set(names)):
            raise ValueError(f"--only takes configs of {' and '.join(model_zoo.FOLDERS)}, got {unknown[0]!r}")
        packages = ("tensorflow", "keras", "numpy")
        where = backends.device_name()
        before = device.kept(args.json, where)
        if other := next((row for row in before if row["tokens"] != args.tokens), None):
            raise ValueError(f"{args.json} has rows of {other['tokens']:,} tokens a step, --tokens is {args.tokens:,}")
        results = device.Results(args, "systems", device=where, packages=packages, rows=before)
        progress = Progress(console)
        for name in args.only or names:
            if not any(row["config"] == name for row in before):
                progress.line(f"{name}")
                results.add(_measure(name, args))
    print(as_text(results.rows, learned))
    return 0


def _measure(name, args):
    from flash_tf.compiling import artifact, programs, timing

    row = {
        "config": name,
        "commit": args.commit or device.commit(),
        "tokens": args.tokens,
        "step_ms": {},
        "quartiles_ms": {},
    }
    for n in LENGTHS:
        prepared, ids = artifact.prepare(_sized(name, n, args.tokens))
        experiment = programs.Experiment(prepared, ids)
        times = timing.time_steps(experiment, args.steps).milliseconds
        low, row["step_ms"][str(n)], high = statistics.quantiles(times, n=4)
        row["quartiles_ms"][str(n)] = [low, high]
        if n == LENGTHS[0]:  # learned positions and Linformer's constants grow with the length
            row["parameters"] = sum(int(v.shape.num_elements()) for v in experiment.model.trainable_variables)
    return {**row, "state_bytes": experiment.model.decode_state_bytes(LENGTHS[-1], 4)}


def _sized(name, n, tokens):
    from flash_tf import config
    from flash_tf.models.language_model import listed

    mixer = listed(config.load(name).model["mixer"])[0]
    constants = [f"model.mixer.{option}={n}" for option in OF_LENGTH if option in mixer]
    return config.load(name, [f"data.sequence_length={n}", f"train.tokens_per_step={tokens}", *constants])


def as_text(rows: list[dict], learned: list[dict]) -> str:
    """The rows as tables in Markdown, causal models first."""
    perplexity = {}  # of the best learning rate
    for row in (row for row in learned if "error" not in row):
        name, found = row["artifact"], row["validation_perplexity"]
        perplexity[name] = min(found, perplexity.get(name, found))
    tables = []
    for folder in dict.fromkeys(row["config"].partition("/")[0] for row in rows):
        own = [row for row in rows if row["config"].startswith(f"{folder}/")]
        own.sort(key=lambda row: perplexity.get(_artifact(row), float("inf")))
        lines = ["| " + " | ".join((folder, "parameters", "perplexity", *(f"step at {n:,}" for n in LENGTHS), "state"))]
        tables.append(
            "\n".join([lines[0] + " |", "|---" * (4 + len(LENGTHS)) + "|", *(_line(r, perplexity) for r in own)])
        )
    return "\n\n".join(tables)


def _artifact(row):
    return row["config"].replace("/", "-")


def _line(row, perplexity):
    found = perplexity.get(_artifact(row))
    cells = [
        row["config"].partition("/")[2],
        f"{row['parameters'] / 1e6:.2f} M",
        "–" if found is None else f"{found:.2f}",
    ]
    cells += [f"{row['step_ms'][str(n)]:,.0f} ms" for n in LENGTHS]
    cells.append("–" if row["state_bytes"] is None else f"{row['state_bytes'] / 2**10:,.0f} KiB")
    return "| " + " | ".join(cells) + " |"


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.systems", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CONFIG", help="default: every config of a system")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step (default 4,096)")
    parser.add_argument("--steps", type=int, default=10, help="timed, after the warm-up (default 10)")
    parser.add_argument("--learning", nargs="+", default=[], metavar="FILE", help="results of benchmarks.learning")
    device.takes_result(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
