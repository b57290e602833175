"""Times the training step of public peers in PyTorch on a CUDA GPU, at the sizes of our models. It needs torch alone.

    python -m benchmarks.peers
    python -m benchmarks.peers --tasks lm --lengths 8192 --attention flash

The Transformer++ has 12 blocks of width 768 with 12 heads, rotary positions, a gated linear unit of 2,048 and a tied
head over 32,000 tokens: 110 M parameters. torch.compile compiles the block once for all twelve, which takes seconds;
`--compile whole` compiles the whole model, which takes minutes. Attention is scaled_dot_product_attention. Weights are
float32 under bfloat16 autocast. The optimizer is fused AdamW after clipping by the global norm. The number of tokens a
step stays the same at each length.
"""

import argparse
import importlib.util

from benchmarks import device, result_files

WIDTH, HEADS, BLOCKS, HIDDEN, VOCABULARY = 768, 12, 12, 2048, 32_000
MASKED = 0.15  # share of positions that a masked model predicts
TASKS = {  # name -> causal, share of positions on which the head runs
    "lm": (True, 1.0),
    "mlm": (False, MASKED),
    "mlm_full_head": (False, 1.0),  # as in models that do not gather the predicted positions
}
COLUMNS = ("task", "n", "batch", "compile s", "median ms", "ktok/s", "TFLOP/s", "MFU", "peak GiB")
WIDTHS = (15, 8, 7, 11, 11, 9, 9, 8, 10)


def predicted(n: int, share: float) -> int:
    """Positions of a sequence on which the head runs."""
    return round(share * n)


def training_flops(n: int, task: str) -> int:
    """Model FLOPs of a Transformer++ step on one sequence: 3 x forward, causal attention counted at half."""
    causal, share = TASKS[task]
    projections = 2 * n * (4 * WIDTH**2 + 3 * WIDTH * HIDDEN)
    attention = (2 if causal else 4) * n**2 * WIDTH
    return 3 * (BLOCKS * (projections + attention) + 2 * predicted(n, share) * WIDTH * VOCABULARY)


def main(arguments: list[str] | None = None) -> int:
    """Times every task at every length; returns the exit status."""
    parser = _parser()
    args = result_files.parse(parser, arguments)
    if args.steps < 10:
        raise ValueError(f"--steps must be 10 or more, for a median, got {args.steps}")
    for n in args.lengths:
        device.batch_size(n, args.tokens)
    if importlib.util.find_spec("torch") is None:
        raise ValueError("it needs PyTorch with CUDA: pip install torch")
    if args.model == "gla":
        _check_gla(parser, args)
    from benchmarks import peers_torch

    results = result_files.Results(
        args,
        "peers",
        device=peers_torch.device_name(),
        packages=("torch", "triton", "flash-linear-attention"),
    )
    print(f"{args.model} in PyTorch on {peers_torch.device_name()}, {args.tokens:,} tokens a step")
    print(device.table_line(COLUMNS, WIDTHS), flush=True)
    for n in args.lengths:
        for row in peers_torch.measure(args, n, args.tasks):
            results.add(row)
            print(_line(row), flush=True)
    return 0


def _check_gla(parser, args):
    """GLA is causal and brings its own kernels, so options of the Transformer++ do not go with it."""
    if args.tasks == parser.get_default("tasks"):
        args.tasks = ["lm"]
    for name, value in {"tasks": ["lm"], "attention": "default", "compile": "blocks"}.items():
        if getattr(args, name) != value:
            raise ValueError(f"--{name} does not go with --model gla")
    if importlib.util.find_spec("fla") is None:
        raise ValueError("gla needs the package flash-linear-attention (fla)")


def _line(row):
    head = (row["task"], row["n"], row["batch"])
    if "error" in row:
        return f"{device.table_line(head, WIDTHS[:3])}  {row['error']}"
    rate, mfu = row["model_flops_per_second"], row["mfu"]
    values = (
        f"{row['compile_s']:.1f}",
        f"{row['median_ms']:.2f}",
        f"{row['tokens_per_second'] / 1e3:.0f}",
        None if rate is None else f"{rate / 1e12:.0f}",
        None if mfu is None else f"{mfu:.1%}",
        f"{row['peak_bytes'] / 2**30:.1f}",
    )
    return device.table_line((*head, *values), WIDTHS)


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("transformer_plus_plus", "gla"), default="transformer_plus_plus")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["lm", "mlm"], help="default: lm mlm")
    device.takes_sizes(parser)
    parser.add_argument("--steps", type=int, default=12, help="timed, after the warm-up (default 12)")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before, beside the first (default 4)")
    parser.add_argument(
        "--attention", choices=("default", "flash", "cudnn"), default="default", help="PyTorch's own choice by default"
    )
    parser.add_argument(
        "--compile", choices=("blocks", "whole"), default="blocks", help="what torch.compile takes at once"
    )
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
