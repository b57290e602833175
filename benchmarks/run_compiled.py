"""Runs an artifact of `flash-tf compile`: checks and times its step, times its decoding; or trains on a token file.

    python -m benchmarks.run_compiled ARTIFACT
    python -m benchmarks.run_compiled ARTIFACT --tokens train.npy --validation validation.npy --out runs/lm

It needs NumPy and JAX alone: a model is traced on one machine and trained on another. A token file is a flat array of
uint16 or int32: the tokens of a split in order, with an eos after each document. The folder of a run is a model
directory: `flash-tf evaluate` reads its weights. A run that was killed continues from its last saved state.
"""

import argparse
import gc
import os

import numpy as np

from benchmarks import device as devices
from benchmarks import result_files
from flash_tf.compiling import manifest as manifests
from flash_tf.training.progress import Progress

TRAINING = ("validation", "out", "evaluate_every", "save_every", "shard_mib", "set")  # options of training alone
STEPS = 20  # timed
NAMES = 16  # width of the column


def main(arguments: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    args = result_files.parse(_parser(), arguments)
    artifact = manifests.read(args.artifact)
    options = dict(option(text) for text in args.xla_option)
    if args.tokens is None and (given := [name for name in TRAINING if getattr(args, name) not in (None, [])]):
        raise ValueError(f"--{given[0].replace('_', '-')} belongs to --tokens; without it the step is timed")
    if args.tokens is not None:
        _check_training(args)
    with devices.libraries_in_log() as console:
        import jax

        jax.config.update("jax_enable_x64", True)  # TensorFlow counts steps in int64
        device, progress = jax.devices()[0], Progress(console)
        if args.tokens is None:
            _time(args, artifact, device, options, progress)
        else:
            _train(args, artifact, device, options, progress)
    return 0


def _check_training(args):
    if args.out is None:
        raise ValueError("--tokens needs --out, where the run is kept")
    if given := [name for name in ("results", "commit", "variant") if getattr(args, name) is not None]:
        raise ValueError(f"--{given[0]} belongs to timing: training keeps its records in --out")
    if args.evaluate_every is not None and args.validation is None:
        raise ValueError("--evaluate-every needs --validation")


def _time(args, artifact, device, options, progress):
    from benchmarks import compiled_decoding, compiled_timing

    steps = STEPS if args.steps is None else args.steps
    if steps < 10:
        raise ValueError(f"--steps must be 10 or more, for a median, got {steps}")
    about = {"device": device.device_kind, "packages": ("jax", "jaxlib", "numpy")}
    results = result_files.Results(args, "train_step", **about)
    progress.line(f"compiling {args.artifact} for {device.device_kind}")
    flags = {"xla_flags": os.environ.get("XLA_FLAGS", "")}  # noqa: TID251  recorded, not obeyed: XLA reads it itself
    row = compiled_timing.measure(args.artifact, artifact, device, steps=steps, options=options)
    results.add({**row, **flags})
    print(_as_text(row, device), flush=True)
    if "decode" in artifact.programs:
        gc.collect()  # the step's variables, before the decoder's
        progress.line(f"compiling its decoding for {device.device_kind}")
        results = result_files.Results(args, "decode", **about)
        for row in compiled_decoding.measure(args.artifact, artifact, device, options=options):
            results.add({**row, **flags})
            print(_decoding_as_text(row), flush=True)


def _as_text(row, device):
    low, high = row["quartiles_ms"]
    rate, mfu, held = row["model_flops_per_second"], row["mfu"], row["allocator_peak_bytes"]
    versions = result_files.versions(("jax", "jaxlib"))
    lines = {
        "step": f"{row['config']}, {row['task']}, {row['batch']:,} x {row['n']:,} = {row['tokens']:,} tokens",
        "device": f"{device.device_kind}, jax {versions['jax']}, jaxlib {versions['jaxlib']}",
        "check": f"passed: losses {', '.join(f'{loss:.4f}' for loss in row['check_losses'])}",
        "compiled in": f"{row['compile_s']:.1f} s",
        "step time": f"{row['median_ms']:.2f} ms, median of {row['steps']} (quartiles {low:.2f} and {high:.2f})",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "model FLOP/s": f"{rate / 1e12:,.3f} T" + (f", MFU {mfu:.1%}" if mfu else ""),
        "memory": f"{row['peak_bytes'] / 2**30:.2f} GiB" + (f", {held / 2**30:.2f} at most held" if held else ""),
    }
    return "\n".join(f"{name:<{NAMES}}{text}" for name, text in lines.items())


def _decoding_as_text(row):
    context = row["context"]
    rate = f"{row['ms_per_token']:.3f} ms a token, {row['tokens_per_second']:,.0f} tokens/s"
    where = f"batch {row['batch']:,}, {row['peak_bytes'] / 2**30:.2f} GiB"
    return f"{f'decode {context:,}':<{NAMES}}{rate}, {where}"


def _train(args, artifact, device, options, progress):
    from benchmarks.compiled_data import Stream, read_tokens
    from benchmarks.compiled_program import Compiled, memory_errors
    from benchmarks.compiled_run import RunFolder, Schedule, fingerprint
    from benchmarks.compiled_timing import prove
    from benchmarks.compiled_training import Plan, Training

    rates = Schedule(artifact, args.set or [])
    plan = _plan(args, Plan, rates.steps)
    files = {name: getattr(args, name) for name in ("tokens", "validation") if getattr(args, name) is not None}
    splits = {name: read_tokens(path, artifact.vocabulary_size) for name, path in files.items()}
    streams = {name: Stream(np.asarray(x), artifact, pad_last=name != "tokens") for name, x in splits.items()}
    folder = RunFolder(args.out, args.artifact, rates, {name: fingerprint(x) for name, x in splits.items()})
    validation = streams.get("validation")

    progress.line(f"compiling {args.artifact} for {device.device_kind}")
    with memory_errors(device, args.artifact):
        prove(args.artifact, artifact, device, options)
        step = Compiled(args.artifact, artifact.programs["step"], device, options)
        forward = Compiled(args.artifact, artifact.programs["forward"], device, options) if validation else None
        progress.line(f"the check passed; the step was compiled in {step.seconds:.1f} s")
        training = Training(artifact, step, forward, device=device, rates=rates, folder=folder, progress=progress)
        training.run(streams["tokens"], validation, plan)


def _plan(args, plan, steps):
    """The plan that the arguments ask for, with defaults for what they leave out."""
    given = {"steps": args.steps, "save_every": args.save_every, "shard_mib": args.shard_mib}
    values = {name: default if given[name] is None else given[name]
              for name, default in (("steps", steps), ("save_every", 1000), ("shard_mib", 16))}  # fmt: skip
    values["evaluate_every"] = args.evaluate_every
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}")
    if values["steps"] > steps:
        raise ValueError(
            f"--steps must be at most train.steps ({steps}), which shapes the learning rate, got {args.steps}"
        )
    return plan(**{n: v for n, v in values.items() if n != "shard_mib"}, shard_bytes=values["shard_mib"] * 2**20)


def option(text):
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"--xla-option takes NAME=VALUE, got {text!r}")
    if value in ("true", "false"):
        return name, value == "true"
    return name, int(value) if value.lstrip("-").isdigit() else value


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_compiled", description=__doc__.splitlines()[0])
    parser.add_argument("artifact", metavar="ARTIFACT", help="a folder that `flash-tf compile --out` wrote")
    parser.add_argument("--steps", type=int, help=f"timed (default {STEPS}), or to train (default train.steps)")
    parser.add_argument(
        "--xla-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of XLA's compiler; may be repeated",
    )
    parser.add_argument("--tokens", metavar="FILE.npy", help="train on these tokens instead of timing")
    parser.add_argument("--validation", metavar="FILE.npy", help="evaluate on these tokens")
    parser.add_argument("--out", metavar="DIR", help="keep the run here")
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="an option of the learning rate, or train.steps"
    )
    parser.add_argument("--evaluate-every", type=int, metavar="STEPS", help="default: at the end")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="save the state this often (default 1,000)")
    parser.add_argument("--shard-mib", type=int, metavar="MIB", help="the largest file of the weights (default 16)")
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    devices.program(main)
