"""Times decoding token by token after texts of different lengths: milliseconds a token, bytes of state.

    python -m benchmarks.decode --set model.depth=4 --set model.width=384
    python -m benchmarks.plots

It runs in TensorFlow on the device at hand. States are filled with random numbers, as if a text of that length had been
read. All models and lengths take turns in one process, so that other load on the machine slows them alike.
"""

import argparse
import itertools
import math
import statistics
import time

import numpy as np

from benchmarks import device, result_files
from benchmarks.train_step import MODELS
from flash_tf.training.progress import Progress

CONTEXTS = (256, 1024, 4096, 16_384, 65_536)
COLUMNS = ("model", "context", "batch", "median ms", "quartiles", "state MiB")
WIDTHS = (22, 9, 7, 11, 16, 11)


def main(arguments: list[str] | None = None) -> int:
    """Times every model at every length."""
    args = result_files.parse(_parser(), arguments)
    wrong = [f"--{n} must be 1 or more" for n in ("batch", "tokens") if getattr(args, n) < 1]
    if args.rounds < 2 or min(args.contexts) < 1 or wrong:
        raise ValueError((wrong or ["--rounds must be 2 or more, and every context 1 or more"])[0])
    with device.libraries_in_log() as console:
        from benchmarks import backends

        if backends.on_jax():
            raise ValueError("it times TensorFlow: unset KERAS_BACKEND")
        results = result_files.Results(args, "decode", device=backends.device_name(), packages=("tensorflow", "keras"))
        progress, cases = Progress(console), []
        for name, n in itertools.product(args.models, args.contexts):
            progress.line(f"compiling {name} after {n:,} tokens")
            cases.append(_case(name, n, args))
        for turn in range(args.rounds + 1):
            progress.status(f"round {turn} of {args.rounds}")
            for run, _, times in cases:
                times += run()[: turn > 0]  # the first warms up
        print(device.table_line(COLUMNS, WIDTHS))
        for _, row, times in cases:
            low, median, high = statistics.quantiles(times, n=4)
            results.add({**row, "ms_per_token": median, "quartiles_ms": [low, high], "rounds": len(times)})
            cells = (row["model"], row["context"], args.batch, f"{median:.3f}", f"{low:.3f}–{high:.3f}")
            print(device.table_line((*cells, f"{row['state_bytes'] / 2**20:.1f}"), WIDTHS))
    return 0


def _case(name, n, args):
    """A function that decodes and returns its milliseconds a token, the row that describes it, and an empty list."""
    from keras import ops

    from flash_tf import config
    from flash_tf.generation import greedy
    from flash_tf.generation.generator import compiled
    from flash_tf.training import modelling

    wanted = config.load(f"lm_wiki40b/{name}", ["data.tokenizer=null", *args.set])
    model = modelling.make_model(wanted)
    capacity = n + args.tokens if model.grows else None
    state, rng = model.initial_state(args.batch, capacity), np.random.default_rng(0)
    state = {k: _random(rng, x) for k, x in state.items()} | {"position": ops.full((args.batch,), n, "int32")}
    tokens = ops.zeros((args.batch,), "int32")
    program = compiled(model, lambda tokens, state: greedy(model, tokens, state, args.tokens)[0], tokens, state)
    size = sum(math.prod(x.shape) * x.dtype.size for x in state.values()) // args.batch
    row = {"program": "decode", "model": name, "framework": "TensorFlow", "context": n, "batch": args.batch}
    row |= {"config": wanted.model, "precision": wanted.train.precision}
    row |= {"state_bytes": size, "tokens_per_call": args.tokens}

    def run():
        start = time.perf_counter()
        program(tokens, state).numpy()
        return [1e3 * (time.perf_counter() - start) / args.tokens]

    return run, row, []


def _random(rng, x):
    from keras import ops

    return ops.cast(rng.standard_normal(tuple(x.shape), np.float32) * 0.1, x.dtype)


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=list(CONTEXTS), metavar="N", help="tokens that came before"
    )
    parser.add_argument("--batch", type=int, default=1, help="texts decoded together (default 1)")
    parser.add_argument("--tokens", type=int, default=64, help="decoded in a call (default 64, as `generate`)")
    parser.add_argument("--rounds", type=int, default=9, help="timed calls of each case (default 9)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override an option of the configs; may be repeated",
    )
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
