"""Measure where the time and memory of a step go.

Examples:
  flash-tf profile quickstart
  flash-tf profile runs/lm --mode decode --batch 8 --out profiles/lm
"""

import tempfile

from flash_tf.commands import gives_json, show, takes_overrides, whole

MODES = ("train", "prefill", "decode")


def add_arguments(parser) -> None:
    group = parser.add_argument_group("config or model")
    group.add_argument("config", metavar="CONFIG_OR_RUN", help="a config's file or name, or the folder of a run")
    takes_overrides(group)
    step = parser.add_argument_group("steps")
    step.add_argument("--mode", choices=MODES, default="train", help="the kind of step (default train)")
    step.add_argument("--steps", type=whole, default=10, metavar="N", help="steps to capture (default 10)")
    step.add_argument("--batch", type=whole, metavar="N", help="texts in a step of prefill or decode (default 1)")
    gives_json(parser, "keep the trace and latency.json here (default RUN/profile; for a config they are not kept)")


def run(args, log) -> None:
    if args.batch is not None and args.mode == "train":
        raise ValueError("--batch is for prefill and decode; train.tokens_per_step sets the batch of training")
    from flash_tf.profiling import latency
    from flash_tf.training import profile

    config, model_dir = profile.load(args.config, args.set)
    kept = args.out or (model_dir and f"{model_dir}/profile")
    if kept:
        latency.check_folder(kept)
    progress = log.progress()
    with tempfile.TemporaryDirectory() as scratch:
        result = profile.profile(
            config,
            args.mode,
            model_dir=model_dir,
            folder=kept or scratch,
            steps=args.steps,
            batch_size=1 if args.batch is None else args.batch,
            progress=progress,
        )
    show(result if args.json else latency.as_text(result), args.json)
    progress.line(f"tensorboard --logdir {kept}" if kept else "--out DIR keeps the trace and latency.json")
