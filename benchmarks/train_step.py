"""Times whole training steps of this package's models at several context lengths, with a fixed number of tokens a step.

    python -m benchmarks.train_step --task mlm
    python -m benchmarks.train_step --exported exports/lm-flash-512 exports/lm-flash-8192
    KERAS_BACKEND=jax python -m benchmarks.train_step --models transformer_plus_plus --lengths 512

The first builds the models of the paper's configs and runs the step in TensorFlow, compiled whole by XLA unless
`--set train.jit_compile=false`. The second runs artifacts of `flash-tf compile`, and needs NumPy and JAX alone. The
third builds the models in Keras on JAX, without TensorFlow; softmax attention is one kernel there on a GPU.
"""

import argparse
import gc
import math
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks import device, result_files

CONFIGS = {"lm": "lm_wiki40b", "mlm": "mlm_c4"}
OF_TENSORFLOW, OF_EXPORTED = (
    ("models", "task", "lengths", "tokens", "set"),
    ("xla_option", "trace"),
)  # options of one way alone
MODELS = ("flash", "flash_quad", "transformer_plus_plus")
COLUMNS = ("model", "task", "n", "batch", "compile s", "median ms", "ktok/s", "TFLOP/s", "MFU", "peak GiB")
WIDTHS = (22, 6, 8, 7, 11, 11, 9, 9, 8, 10)


def main(arguments: list[str] | None = None) -> int:
    """Times every step; returns 1 if one is wrong."""
    parser = _parser()
    args = result_files.parse(parser, arguments)
    if args.steps < 10:
        raise ValueError(f"--steps must be 10 or more, for a median, got {args.steps}")
    for name in OF_TENSORFLOW if args.exported else OF_EXPORTED:
        if getattr(args, name) != parser.get_default(name):
            side = "does not go with" if args.exported else "needs"
            raise ValueError(f"--{name.replace('_', '-')} {side} --exported")
    args.variant = result_files.variant(args, *args.xla_option)
    with device.libraries_in_log():
        name, packages, rows = _through_jax(args) if args.exported else _in_keras(args)
        results = result_files.Results(args, "train_step", device=name, packages=packages)
        print(f"training steps on {name}")
        print(device.table_line(COLUMNS, WIDTHS), flush=True)
        for row in rows:
            results.add({**row, "xla_flags": os.environ.get("XLA_FLAGS", "")})  # noqa: TID251  recorded, not obeyed
            print(_line(row), flush=True)
    return int(any(row.get("wrong") for row in results.rows))


def _through_jax(args):
    from benchmarks import run_compiled
    from flash_tf.compiling import manifest

    names = [Path(directory).resolve().name for directory in args.exported]
    if args.trace is not None and len({*names}) < len(names):
        raise ValueError(f"--trace names files after the exported folders, which must differ, got {' '.join(names)}")
    artifacts = {directory: manifest.read(directory) for directory in args.exported}
    options = dict(run_compiled.option(text) for text in args.xla_option)
    import jax

    jax.config.update("jax_enable_x64", True)  # TensorFlow counts steps in int64
    found = jax.devices()[0]
    name = device.cpu() if found.platform == "cpu" else found.device_kind
    return name, ("jax", "jaxlib", "numpy"), _exported_rows(artifacts, found, args, options)


def _exported_rows(artifacts, where, args, options) -> Iterator[dict]:
    from benchmarks.compiled_program import DeviceMemoryError
    from benchmarks.compiled_timing import ParityError, measure, trace

    for directory, manifest in artifacts.items():
        row = {"artifact": directory}
        try:
            row |= measure(directory, manifest, where, steps=args.steps, options=options)
            if args.trace is not None:
                trace(directory, manifest, where, f"{args.trace}/{Path(directory).resolve().name}.xplane.pb", options)
        except DeviceMemoryError as error:
            row |= {**_about(manifest), "error": "out of memory", "detail": str(error)}
        except ParityError as error:
            row |= {**_about(manifest), "wrong": True, "error": str(error)}
        yield row
        gc.collect()  # free the variables before the next step


def _about(manifest):
    """The description in a row that has no time."""
    program = manifest.programs["step"]
    row = {
        "model": manifest.name.split("/")[-1].removesuffix(".yaml"),
        "framework": "TensorFlow",
        "runner": "JAX",
        "task": device.TASKS[manifest.task],
    }
    row |= {"config": manifest.name, "n": program.sequence_length}
    return row | {"batch": program.batch_size, "tokens": program.tokens}


def _in_keras(args):
    for n in args.lengths:
        device.batch_size(n, args.tokens)
    from benchmarks import backends
    from flash_tf import config
    from flash_tf.training import modelling

    names = [(f"{CONFIGS[args.task]}/{model}", n) for model in args.models for n in args.lengths]
    sizes = lambda n: [f"data.sequence_length={n}", f"train.tokens_per_step={args.tokens}"]  # noqa: E731
    wanted = [(name, modelling.with_masking(config.load(name, [*sizes(n), *args.set]))) for name, n in names]
    if backends.on_jax():
        return backends.device_name(), ("keras", "jax", "jaxlib", "numpy"), _jax_rows(wanted, args)
    from flash_tf.compiling import artifact

    wanted = [(name, *artifact.resolve(config)) for name, config in wanted]
    return backends.device_name(), ("tensorflow", "keras", "numpy"), _tensorflow_rows(wanted, args)


def _in_keras_row(name, config, framework, runner):
    from flash_tf.training import modelling

    n = config.data.sequence_length
    row = {"model": name.split("/")[1], "framework": framework, "runner": runner, "config": name, "n": n}
    row |= {"task": device.TASKS[config.model["type"]], "batch": config.batch_size}
    row |= {"tokens": config.train.tokens_per_step, "predicted": modelling.predicted(config)}
    return row


def _jax_rows(wanted, args) -> Iterator[dict]:
    from benchmarks import backends, keras_step

    for name, config in wanted:
        row = _in_keras_row(name, config, "Keras on JAX", "JAX")
        try:
            row |= keras_step.measure(config, args.steps)
        except keras_step.GradientError as error:
            row |= {"wrong": True, "error": f"not timed: {error}"}
        except Exception as error:  # of JAX, whose types differ by version
            if not backends.is_out_of_memory(error):
                raise
            row |= {"error": "out of memory"}
        yield row
        gc.collect()  # free the model's memory before the next one


def _tensorflow_rows(wanted, args) -> Iterator[dict]:
    for name, config, ids in wanted:
        yield _tensorflow_row(name, config, ids, args)
        gc.collect()  # free the model's memory before the next one


def _tensorflow_row(name, config, ids, args):
    import tensorflow as tf

    from benchmarks import backends
    from flash_tf.compiling import programs, timing
    from flash_tf.training import modelling

    row = _in_keras_row(name, config, "TensorFlow", "TensorFlow")
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:  # else a step that did not fit would count into the next peak
        tf.config.experimental.reset_memory_stats("GPU:0")
    try:
        experiment = programs.Experiment(config, ids)
        timed = timing.time_steps(experiment, args.steps)
        compile_s, milliseconds, loss = timed.compile_s, timed.milliseconds, timed.loss
    except tf.errors.ResourceExhaustedError:
        return {**row, "error": "out of memory"}
    if not math.isfinite(loss):
        return {**row, "wrong": True, "error": f"not timed: it trains to a loss of {loss}"}
    flops = modelling.training_flops_per_step(config, experiment.model)
    peak = (
        tf.config.experimental.get_memory_info("GPU:0")["peak"] if gpus else None
    )  # TensorFlow counts no memory on a CPU
    known = backends.device_name() if config.train.precision == "mixed_bfloat16" else ""  # the peaks hold for bfloat16
    found = device.timing(milliseconds, tokens=row["tokens"], flops=flops, device=known)
    return {**row, **found, "compile_s": compile_s, "peak_bytes": peak, "last_loss": loss}


def _line(row):
    head = (row["model"], row["task"], row["n"], row["batch"])
    if "error" in row:
        return f"{device.table_line(head, WIDTHS[:4])}  {row['error']}"
    mfu, peak = row["mfu"], row["peak_bytes"]
    values = (
        f"{row['compile_s']:.1f}",
        f"{row['median_ms']:.2f}",
        f"{row['tokens_per_second'] / 1e3:.1f}",
        f"{row['model_flops_per_second'] / 1e12:.2f}",
        None if mfu is None else f"{mfu:.1%}",
        None if peak is None else f"{peak / 2**30:.1f}",
    )
    return device.table_line((*head, *values), WIDTHS)


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), metavar="MODEL", help=f"default: {' '.join(MODELS)}"
    )
    parser.add_argument("--task", choices=CONFIGS, default="lm")
    device.takes_sizes(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override an option of the configs; may be repeated",
    )
    parser.add_argument("--steps", type=int, default=12, help="timed, after the warm-up (default 12)")
    parser.add_argument(
        "--exported", nargs="+", metavar="DIR", help="time these artifacts of `flash-tf compile` instead"
    )
    parser.add_argument(
        "--xla-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of XLA's compiler, with --exported; may be repeated",
    )
    parser.add_argument(
        "--trace", metavar="DIR", help="with --exported: trace a few more steps for `python -m benchmarks.breakdown`"
    )
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
