"""Times the Triton kernels of the package fla (flash-linear-attention) at the sizes of `benchmarks.kernels`.

    python -m benchmarks.peer_kernels --lengths 512 8192 65536

It needs PyTorch with CUDA and fla, and nothing of this package but `benchmarks`. The kernels have the names of
`benchmarks.kernels` and append to the same file, with the backend `fla`: gated linear attention, retention, and
linear attention with its normalizer. `softmax_attention` is PyTorch's own, for scale. All are causal. Inputs are
normal, for linear attention uniform from 0 to 1, and gates are sigmoids of normal numbers around 3. A time is the
host's, until the device has finished.
"""

import argparse
import importlib.util
import time

from benchmarks import device, result_files

KERNELS = ("gla", "retention", "linear_attention", "softmax_attention")
LENGTHS = (512, 2048, 8192)
HEADS, KEY, VALUE = 12, 64, 64  # as `benchmarks.kernels` has them
WARM_UP = 3  # Triton tries its variants in the first call
COLUMNS = ("kernel", "pass", "n", "batch", "compile s", "median ms")
WIDTHS = (18, 20, 8, 7, 11, 12)


def main(arguments: list[str] | None = None) -> int:
    """Times every kernel at every length; returns the exit status."""
    args = result_files.parse(_parser(), arguments)
    if args.repeats < 2:
        raise ValueError(f"--repeats must be 2 or more, for a median, got {args.repeats}")
    for n in args.lengths:
        device.batch_size(n, args.tokens)
    if missing := [name for name in ("torch", "fla") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"it needs the packages torch and fla, and {' and '.join(missing)} cannot be imported")
    from benchmarks import peers_torch

    where = peers_torch.device_name()
    results = result_files.Results(args, "kernels", device=where, packages=("torch", "triton", "fla-core"))
    print(f"kernels of fla in bfloat16 on {where}, {args.tokens:,} tokens")
    print(device.table_line(COLUMNS, WIDTHS), flush=True)
    for kernel in args.kernel:
        for n in args.lengths:
            for backward in (False, True):
                row = _row(kernel, n, backward, args)
                results.add(row)
                cells = (row[name] for name in ("kernel", "pass", "n", "batch"))
                print(
                    device.table_line((*cells, f"{row['compile_s']:.1f}", f"{row['median_ms']:.2f}"), WIDTHS),
                    flush=True,
                )
    return 0


def _row(kernel, n, backward, args):
    import torch

    sizes = {"b": device.batch_size(n, args.tokens), "n": n, "h": HEADS, "s": KEY, "e": VALUE}
    torch.manual_seed(0)
    draw = torch.rand if kernel == "linear_attention" else torch.randn
    shapes = [(sizes["b"], n, HEADS, width) for width in (KEY, KEY, VALUE)]
    inputs = [draw(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    if kernel == "gla":
        inputs.append(torch.nn.functional.logsigmoid(torch.randn_like(inputs[0]) + 3))
    for x in inputs:
        x.requires_grad_(backward)
    function, cotangent = _function(kernel), torch.randn_like(inputs[2])

    def run():
        start = time.perf_counter()
        out = function(*inputs)
        if backward:
            torch.autograd.grad(out, inputs, cotangent)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    torch.cuda.synchronize()
    compile_s = run() / 1e3
    for _ in range(WARM_UP):
        run()
    found = device.timing([run() for _ in range(args.repeats)], tokens=args.tokens, flops=None, device="")
    row = {"kernel": kernel, "backend": "torch" if kernel == "softmax_attention" else "fla", "dtype": "bfloat16"}
    row |= {"sizes": sizes, "n": n, "batch": sizes["b"], "pass": "forward, backward" if backward else "forward"}
    return {**row, **found, "compile_s": compile_s}


def _function(kernel):
    """A function of q, k `[b, n, h, s]`, v `[b, n, h, e]` and, for gla, the gates' logarithms `[b, n, h, s]`."""
    if kernel == "softmax_attention":
        from torch.nn.functional import scaled_dot_product_attention

        return lambda *qkv: scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=True).transpose(
            1, 2
        )
    if kernel == "gla":
        from fla.ops.gla import chunk_gla

        return lambda q, k, v, g: chunk_gla(q, k, v, g)[0]
    if kernel == "retention":
        from fla.ops.retention import chunk_retention

        return lambda q, k, v: chunk_retention(q, k, v)[0]
    from fla.ops.linear_attn import chunk_linear_attn

    return lambda q, k, v: chunk_linear_attn(q, k, v, normalize=True)[0]


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_kernels", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kernel", nargs="+", default=list(KERNELS), choices=KERNELS, metavar="NAME", help="all by default"
    )
    device.takes_sizes(parser, LENGTHS)
    parser.add_argument("--repeats", type=int, default=10, help="runs of each timing (default 10)")
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
