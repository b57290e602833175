"""Where the time of a step goes: device, host, input; its costliest operations, FLOP/s and memory."""

import tempfile

from flash_tf.commands import gives_json, show

MODES = ("train", "prefill", "decode")


def add_arguments(parser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG_OR_MODEL_DIR", help="a config's file or name, or where `train` left a run"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override an option of a config; repeatable",
    )
    parser.add_argument("--mode", choices=MODES, default="train", help="what a step is (default train)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps to capture (default 10)")
    parser.add_argument(
        "--batch", type=int, metavar="N", help="texts that prefill or decode takes together (default 1)"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where trace and latency.json go; default MODEL_DIR/profile, of a config nowhere"
    )
    gives_json(parser)


def run(args, log) -> None:
    if args.batch is not None and args.mode == "train":
        raise ValueError("--batch belongs to prefill and decode; training's follows from train.tokens_per_step")
    from flash_tf.profiling import latency
    from flash_tf.training import profile_modes

    config, model_dir = profile_modes.load(args.config, args.set)
    kept = args.out or (model_dir and f"{model_dir}/profile")
    progress = log.progress()
    with tempfile.TemporaryDirectory() as scratch:
        result = profile_modes.profile(
            config,
            args.mode,
            model_dir=model_dir,
            folder=kept or scratch,
            steps=args.steps,
            rows=1 if args.batch is None else args.batch,
            progress=progress,
        )
    show(result if args.json else latency.as_text(result), args.json)
    progress.line(f"tensorboard --logdir {kept}" if kept else "--out DIR keeps the trace and latency.json")
