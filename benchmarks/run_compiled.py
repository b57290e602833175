"""Runs an artifact of `flash-tf compile`: checks and times its step, and times its decoding.

    python -m benchmarks.run_compiled ARTIFACT

It needs NumPy and JAX alone: a model is traced on one machine and timed on another.
"""

import argparse
import gc
import os

from benchmarks import device as devices
from benchmarks import result_files
from flash_tf.compiling import manifest as manifests
from flash_tf.training.progress import Progress

STEPS = 20  # timed
NAMES = 16  # width of the column


def main(arguments: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    args = result_files.parse(_parser(), arguments)
    artifact = manifests.read(args.artifact)
    options = dict(option(text) for text in args.xla_option)
    if args.steps < 10:
        raise ValueError(f"--steps must be 10 or more, for a median, got {args.steps}")
    with devices.libraries_in_log() as console:
        import jax

        jax.config.update("jax_enable_x64", True)  # TensorFlow counts steps in int64
        _time(args, artifact, jax.devices()[0], options, Progress(console))
    return 0


def _time(args, artifact, device, options, progress):
    from benchmarks import compiled_decoding, compiled_timing

    about = {"device": device.device_kind, "packages": ("jax", "jaxlib", "numpy")}
    results = result_files.Results(args, "train_step", **about)
    progress.line(f"compiling {args.artifact} for {device.device_kind}")
    flags = {"xla_flags": os.environ.get("XLA_FLAGS", "")}  # noqa: TID251  recorded, not obeyed: XLA reads it itself
    row = compiled_timing.measure(args.artifact, artifact, device, steps=args.steps, options=options)
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
    parser.add_argument("--steps", type=int, default=STEPS, help=f"timed (default {STEPS})")
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
