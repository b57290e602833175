"""Train a config, or resume its run.

Examples:
  flash-tf train quickstart
  flash-tf train mlm_c4/flash --model-dir runs/c4 --set train.steps=1000
"""

import os

from flash_tf.commands import takes_config


def add_arguments(parser) -> None:
    takes_config(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--model-dir", metavar="DIR", help="the folder of the run, new or to resume (default runs/CONFIG)")


def run(args, log) -> None:
    from flash_tf import config
    from flash_tf.training import loop

    experiment, progress = config.load(args.config, args.set), log.progress()
    model_dir = args.model_dir or f"runs/{args.config.removesuffix('.yaml').strip('./').replace('/', '-')}"
    if "://" not in model_dir:
        os.makedirs(model_dir, exist_ok=True)
        log.move(f"{model_dir}/log.txt")
    loop.train(experiment, model_dir, progress)
    progress.line(f"done; the run is in {model_dir}")
