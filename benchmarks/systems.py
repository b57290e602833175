"""Every system at one small size: parameters, time of a training step at two lengths, bytes of a decoding state.

    python -m benchmarks.systems            # measure, then print the tables
    python -m benchmarks.systems --table    # print the tables of what was measured

It runs in TensorFlow on the device at hand, 4,096 tokens a step. A system that has a row of this commit, device and
number of tokens is not measured again, so the command may be stopped and started again. The tables are Markdown, one
for each device and folder of configs. Perplexities are the best of `benchmarks.one_pass`.
"""

import argparse
import statistics

from benchmarks import device, one_pass, result_files
from flash_tf.training.progress import Progress

LENGTHS = (512, 4096)
OF_LENGTH = ("cosine_length", "max_length")  # options of mixers that must be at least the length


def main(arguments: list[str] | None = None) -> int:
    """Measures what the file lacks, and prints the tables."""
    args = result_files.parse(_parser(), arguments)
    if not args.table:
        _measure_all(args)
    rows = result_files.read(args.results or result_files.path_of("systems"))
    rows = result_files.newest((row for row in rows if row["tokens"] == args.tokens), "device", "config")
    print(as_text(rows, one_pass.best(result_files.read(args.one_pass or result_files.path_of("one_pass")))))
    return 0


def _measure_all(args):
    with device.libraries_in_log() as console:
        from benchmarks import backends
        from flash_tf import config, model_zoo

        names = [name for name in config.names() if name.partition("/")[0] in model_zoo.FOLDERS]
        if unknown := sorted(set(args.only or names) - set(names)):
            raise ValueError(f"--only takes configs of {' and '.join(model_zoo.FOLDERS)}, got {unknown[0]!r}")
        packages = ("tensorflow", "keras", "numpy")
        results = result_files.Results(args, "systems", device=backends.device_name(), packages=packages)
        progress = Progress(console)
        for name in args.only or names:
            if not results.has(config=name, tokens=args.tokens):
                progress.line(name)
                results.add(_measure(name, args))


def _measure(name, args):
    from flash_tf.compiling import artifact, programs, timing

    row = {"config": name, "tokens": args.tokens, "step_ms": {}, "quartiles_ms": {}}
    for n in LENGTHS:
        config, ids = artifact.resolve(_sized(name, n, args.tokens))
        experiment = programs.Experiment(config, ids)
        times = timing.time_steps(experiment, args.steps).milliseconds
        low, row["step_ms"][str(n)], high = statistics.quantiles(times, n=4)
        row["quartiles_ms"][str(n)] = [low, high]
        if n == LENGTHS[0]:  # parameters of learned positions and of Linformer grow with the length
            row["parameters"] = sum(int(v.shape.num_elements()) for v in experiment.model.trainable_variables)
    return {**row, "state_bytes": experiment.model.decode_state_bytes(LENGTHS[-1], 4)}


def _sized(name, n, tokens):
    from flash_tf import config
    from flash_tf.models.language_model import listed

    mixer = listed(config.load(name).model["mixer"])[0]
    constants = [f"model.mixer.{option}={n}" for option in OF_LENGTH if option in mixer]
    return config.load(name, [f"data.sequence_length={n}", f"train.tokens_per_step={tokens}", *constants])


def as_text(rows: list[dict], perplexity: dict[str, float]) -> str:
    """A Markdown table for each device and folder of configs, ordered by the perplexities of the configs."""
    head = ("parameters", "perplexity", *(f"step at {n:,}" for n in LENGTHS), "state")
    tables = []
    for where, folder in dict.fromkeys((row["device"], row["config"].partition("/")[0]) for row in rows):
        own = [row for row in rows if row["device"] == where and row["config"].startswith(f"{folder}/")]
        own.sort(key=lambda row: perplexity.get(row["config"], float("inf")))
        lines = [f"Steps on {where}:", "", f"| {folder} | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
        tables.append("\n".join([*lines, *(_line(row, perplexity) for row in own)]))
    return "\n\n".join(tables)


def _line(row, perplexity):
    found = perplexity.get(row["config"])
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
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a step (default 4,096)")
    parser.add_argument("--steps", type=int, default=10, help="timed, after the warm-up (default 10)")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--one-pass", metavar="FILE", help="perplexities (default: benchmarks/results/one_pass.jsonl)")
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
