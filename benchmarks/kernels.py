"""Times every kernel, forward alone and with its gradients, after comparing it with its reference.

    python -m benchmarks.kernels
    KERAS_BACKEND=jax python -m benchmarks.kernels --kernel flash --tokens 4096
    python -m benchmarks.kernels --kernel linear_attention --vary form chunks cumsum matmul

The kernels are the ones that the contract tests find, and the attention of cosFormer and FAVOR+. A kernel that differs
from its reference is not timed.
"""

import argparse
import dataclasses
import functools
import importlib
import inspect
import time

import numpy as np
import yaml

from benchmarks import device, result_files
from tests import oracles

LENGTHS = (512, 2048, 8192)
COMPOSED = {"causal": True, "normalized": True}  # the case of `benchmarks.composed`
CASES = {**oracles.CASES, "cosformer": (COMPOSED,), "favor": (COMPOSED,)}
TIMED = {**oracles.TIMED, "cosformer": COMPOSED, "favor": COMPOSED}
# FLASH of width 768: one head of key width 128 and value width 2 x 768.
SIZES = {"h": 1, "k": 1, "s": 128, "e": 1536, "r": 128, "d": 768, "w": 4}
MANY_HEADS = {"h": 12, "s": 64, "e": 64}  # the Transformer++ of that width
OF_MANY_HEADS = (
    "diag_attention",
    "combiner_axial",
    "combiner_fixed",
    "retention",
    "gla",
    "cosformer",
    "favor",
    "kernelized_attention",
    "skyformer",
    "reformer",
    "linear_attention",
    "transformer_ls",
    "transformer_ls_causal",
    "mc_tfm",
    "nystromformer",
    "linformer",
    "random_features",
    "rotary",
    "softmax_attention",
    "grouped_query_attention",
    "bigbird",
    "informer",
)
PARTED = 300  # tokens
FUSED = {  # and where its fused form is
    "selective_scan": "kernels_pallas.mamba",
    "gla": "kernels_pallas.decayed",
    "retention": "kernels_pallas.decayed",
}
SMALL = {"b": 2, "h": 2, "k": 2, "s": 16, "e": 16, "r": 8, "d": 12, "m": 40, "w": 4}
PARITY = 2e-5  # relative root mean square: two results, each after some hundred float32 roundings of 6e-8
COLUMNS = ("kernel", "pass", "n", "batch", "compile s", "median ms", "GFLOP/s", "parity")
WIDTHS = (14, 20, 8, 7, 11, 12, 10, 10)


def main(arguments: list[str] | None = None) -> int:
    """Times the kernels; returns 1 if one is wrong."""
    args = result_files.parse(_parser(), arguments)
    if args.repeats < 2:
        raise ValueError(f"--repeats must be 2 or more, for a median, got {args.repeats}")
    for n in args.lengths:
        device.batch_size(n, args.tokens)
    with device.libraries_in_log():
        return _run(args)


def _run(args):
    import kernels_xla
    from benchmarks import backends, composed

    specs = {**kernels_xla.specs(), **composed.SPECS}
    if unknown := set(args.kernel or specs) - specs.keys():
        raise ValueError(f"no kernel is called {', '.join(sorted(unknown))}; there are {', '.join(specs)}")
    results = result_files.Results(
        args,
        "kernels",
        device=backends.device_name(),
        packages=("keras", "jax", "jaxlib") if backends.on_jax() else ("keras", "tensorflow"),
    )
    backends.full_precision()
    backend = "JAX" if backends.on_jax() else "TensorFlow"
    print(f"kernels in {args.dtype} on {backends.device_name()} through {backend}, {args.tokens:,} tokens")
    print(device.table_line(COLUMNS, WIDTHS), flush=True)
    chosen = [specs[name] for name in args.kernel or (FUSED if args.fused else specs)]
    if args.fused:
        chosen = [fused(spec) for spec in chosen]
    for spec, case in ((one, case) for one in chosen for case in varied(one, args.vary)):
        if args.vary is not None:
            print(f"{args.vary[0]} {case[args.vary[0]]}:", flush=True)
        for row in measure(spec, case, args):
            results.add(row)
            print(_line(row), flush=True)
    return int(any(row["parity_error"] > PARITY for row in results.rows))


def varied(spec, vary) -> list[dict]:
    """The options to time. `vary`, `[name, value, ...]`, gives one dictionary for each value; None gives one alone."""
    if vary is None:
        return [dict(TIMED[spec.name])]
    name, *values = vary
    if name not in inspect.signature(spec.fast).parameters or name in spec.inputs or not values:
        raise ValueError(f"--vary needs an option of the kernel {spec.name} and its values, got {' '.join(vary)}")
    return [{**TIMED[spec.name], name: yaml.safe_load(value)} for value in values]


def fused(spec):
    """The kernel in its fused form; a ValueError if it has none that runs here."""
    from kernels_pallas import programs

    if spec.name not in FUSED:
        raise ValueError(f"--fused takes {', '.join(FUSED)}, got {spec.name}")
    if (found := programs.machine_obstacle()) is not None:
        raise ValueError(f"--fused needs {found}")
    function = getattr(importlib.import_module(FUSED[spec.name]), spec.fast.__name__)
    known = inspect.signature(function).parameters  # the others are the speed of einsums alone, or not fused
    fast = lambda **given: function(**{name: x for name, x in given.items() if name in known})  # noqa: E731
    inputs = {name: axes for name, axes in spec.inputs.items() if name in known}
    return dataclasses.replace(spec, fast=fast, inputs=inputs)


def measure(spec, case, args):
    """The rows of one kernel, one for each length and pass; or a single row that says how the kernel is wrong."""
    from benchmarks import backends

    error, where = parity(spec, case, args.fused)
    row = {"kernel": spec.name, "backend": "jax" if backends.on_jax() else "tensorflow", "parity_error": error}
    if error > PARITY:
        yield {**row, "error": f"not timed: {where} is off by {error:.1e}, more than {PARITY:.0e}"}
        return
    row |= {"dtype": args.dtype, "case": case} | ({"fused": True} if args.fused else {})
    for n in args.lengths:
        own = {"s": 16} if spec.name == "selective_scan" else {}  # Mamba's states a channel
        sizes = {**SIZES, **(MANY_HEADS if spec.name in OF_MANY_HEADS else {}), **own}
        sizes |= {"b": device.batch_size(n, args.tokens), "n": n, "m": n}
        inputs = {name: backends.tensor(x, args.dtype) for name, x in draw(spec.of(case), sizes).items()}
        for backward in (False, True):
            sized = {**row, "sizes": sizes, "n": n, "batch": sizes["b"]}
            try:
                found = _timed(spec, case, sizes, inputs, backward, args)
            except Exception as error:  # of either backend
                if not backends.is_out_of_memory(error):
                    raise
                found = {"error": "out of memory"}
            yield {**sized, "pass": "forward, backward" if backward else "forward", **found}


def _timed(spec, case, sizes, inputs, backward, args):
    """Compile time, median and quartiles, achieved FLOP/s. A backward pass counts as two forward passes."""
    from benchmarks import backends

    function = functools.partial(spec.fast, **case)
    forward = backends.compiled(lambda inputs: function(**inputs))
    if backward:
        both = backends.compiled(backends.with_gradients(function))
        cotangent = forward(inputs)  # any tensor of this shape serves
        run = functools.partial(both, inputs, cotangent)
    else:
        run = functools.partial(forward, inputs)
    compile_s, *_ = _seconds(run, 1)
    _seconds(run, 1)  # the first run after compiling may still allocate
    milliseconds = [1e3 * seconds for seconds in _seconds(run, args.repeats)]
    flops = (3 if backward else 1) * spec.flops(sizes, case)
    known = backends.device_name() if args.dtype == "bfloat16" else ""  # the peaks are of bfloat16
    found = device.timing(milliseconds, tokens=sizes["b"] * sizes["n"], flops=flops, device=known)
    return {**found, "compile_s": compile_s}


def _seconds(run, repeats):
    from benchmarks import backends

    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        backends.wait(run())
        times.append(time.perf_counter() - start)
    return times


def parity(spec, timed, of_fused: bool = False) -> tuple[float, str]:
    """The kernel's largest error against its reference, and where: in the value or in a gradient, and in which case.

    It checks every test case, uncompiled, and the `timed` case, compiled by XLA. Inputs are small, in float32, and
    longer than two chunks. Fused forms are all compiled, and also take inputs so long that rows are parted.
    """
    checks = [(case, of_fused) for case in CASES[spec.name]] + [(timed, True)]
    checks += [(timed, True, PARTED)] if of_fused else []
    return max((_difference(spec, *check) for check in checks), key=lambda found: found[0])


def _difference(spec, case, compile_it, n=None):
    from benchmarks import backends

    sizes = {**SMALL, "n": 2 * case.get("chunk_size", 16) + 5 if n is None else n}
    inputs = {name: backends.tensor(x) for name, x in draw(spec.of(case), sizes).items()}
    shape = tuple(spec.reference(**inputs, **case).shape)
    cotangent = backends.tensor(np.random.default_rng(1).standard_normal(shape, "float32"))
    got = _value_and_gradients(spec.fast, case, inputs, cotangent, compile_it)
    want = _value_and_gradients(spec.reference, case, inputs, cotangent, False)
    errors = {name: relative_error(got[name], want[name]) for name in want}
    worst = max(errors, key=errors.get)
    return errors[worst], f"{worst} at {case}"


def _value_and_gradients(function, case, inputs, cotangent, compile_it):
    from benchmarks import backends

    both = backends.with_gradients(functools.partial(function, **case))
    out, gradients = (backends.compiled(both) if compile_it else both)(inputs, cotangent)
    return {"its value": out, **{f"the gradient of {name}": x for name, x in gradients.items()}}


def relative_error(got, want) -> float:
    """The RMS of the error over the RMS of `want`; infinite unless both are finite and have one shape."""
    got, want = np.asarray(got, "float64"), np.asarray(want, "float64")
    if got.shape != want.shape or not (np.isfinite(got).all() and np.isfinite(want).all()):
        return float("inf")
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def draw(spec, sizes) -> dict[str, np.ndarray]:
    """A float32 array for each input that a kernel declares; positions are int32.

    Numbers are uniform over the range that the kernel declares, else normal. Parameters are a tenth as large.
    """
    rng = np.random.default_rng(0)

    def one(name, axes):
        if name == "positions":
            return np.broadcast_to(np.arange(sizes["n"], dtype="int32"), (sizes["b"], sizes["n"]))
        if name in spec.ranges:
            return rng.uniform(*spec.ranges[name], [sizes[axis] for axis in axes]).astype("float32")
        size = np.float32(1 if "n" in axes else 0.1)  # a large negative bias would turn relu² into zeros
        return size * np.asarray(rng.standard_normal([sizes[axis] for axis in axes], "float32"))

    return {name: one(name, axes) for name, axes in spec.inputs.items()}


def _line(row):
    if "error" in row:
        head = [row[name] for name in ("kernel", "pass", "n", "batch") if name in row]
        return f"{device.table_line(head, WIDTHS[: len(head)])}  {row['error']}"
    values = (
        row["kernel"],
        row["pass"],
        row["n"],
        row["batch"],
        f"{row['compile_s']:.1f}",
        f"{row['median_ms']:.2f}",
        f"{row['model_flops_per_second'] / 1e9:,.0f}",
        f"{row['parity_error']:.0e}",
    )
    return device.table_line(values, WIDTHS)


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", nargs="+", metavar="NAME", help="all by default")
    vary = "an option of the kernels, and the values to time: form chunks cumsum matmul"
    parser.add_argument("--vary", nargs="+", metavar=("NAME", "VALUE"), help=vary)
    parser.add_argument("--fused", action="store_true", help="the fused form of `kernels_pallas`, on a GPU")
    device.takes_sizes(parser, LENGTHS)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the timed inputs"
    )
    parser.add_argument("--repeats", type=int, default=10, help="runs of each timing (default 10)")
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
