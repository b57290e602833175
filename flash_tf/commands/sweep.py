"""Train a config with each of some values, and compare the runs on validation.

Examples:
  flash-tf sweep glue/rte --set optimizer.learning_rate=1e-5,3e-5,1e-4
  flash-tf sweep quickstart --set train.seed=0,1,2 --set train.steps=500 --json
"""

from flash_tf.commands import gives_json, show, takes_config


def add_arguments(parser) -> None:
    takes_config(parser)
    group = parser.add_argument_group("runs")
    group.add_argument("--model-dir", metavar="DIR", help="the folder of the runs' folders (default runs/CONFIG-sweep)")
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf.training import run_directory, sweep

    name = args.config.removesuffix(".yaml").strip("./").replace("/", "-")
    begins = lambda model_dir: log.move(f"{model_dir}/{run_directory.LOG}")  # noqa: E731
    found = sweep.sweep(args.config, args.set, args.model_dir or f"runs/{name}-sweep", log.progress(), begins)
    show(found if args.json else sweep.as_text(found), args.json)
