"""Train a config, or resume its run.

Examples:
  flash-tf train quickstart --set train.steps=1000
  flash-tf train runs/quickstart --extend 2000
"""

from flash_tf import config, owned_files
from flash_tf.commands import takes_overrides, whole


def add_arguments(parser) -> None:
    group = parser.add_argument_group("config or run")
    group.add_argument(
        "config", metavar="CONFIG_OR_RUN", help="a YAML file, a name from `flash-tf list`, or the folder of a run"
    )
    takes_overrides(group)
    run = parser.add_argument_group("run")
    run.add_argument("--model-dir", metavar="DIR", help="the folder of the run, new or to resume (default runs/CONFIG)")
    longer = parser.add_argument_group("more steps")
    longer.add_argument(
        "--extend",
        type=whole,
        metavar="STEPS",
        help="train the run to so many steps in all, as if they were planned from the start",
    )
    longer.add_argument(
        "--schedule", choices=("constant",), help="with --extend: keep the learning rate of the newest checkpoint"
    )


def backend(args) -> str:
    """The Keras backend of the config's strategy."""
    return "jax" if _experiment(args)[0].strategy.type == "jax" else "tensorflow"


def run(args, log) -> None:
    if args.schedule is not None and args.extend is None:
        raise ValueError("--schedule is for --extend; optimizer.schedule is the one of a new run")
    experiment, model_dir, progress = *_experiment(args), log.progress()
    if experiment.strategy.type == "jax":
        from flash_tf.training.on_jax import loop
    else:
        from flash_tf.training import loop
    from flash_tf.training import run_directory
    from flash_tf.training.extend import extended

    if args.extend is not None:
        experiment = extended(experiment, model_dir, args.extend, args.schedule == "constant", progress.line)
    begins = (
        (lambda: log.move(f"{model_dir}/{run_directory.LOG}")) if owned_files.is_local(model_dir) else (lambda: None)
    )
    loop.train(experiment, model_dir, progress, args.extend is not None, begins)
    progress.line(f"done; the run is in {model_dir}")


def _experiment(args):
    """The config and the folder of its run."""
    from etils import epath

    from flash_tf.training import run_directory

    found = owned_files.reachable(args.config.rstrip("/"))
    path = f"{found}/{run_directory.CONFIG}"
    if found in config.names() or not epath.Path(path).exists():
        if args.extend is not None:
            raise ValueError(f"--extend needs the folder of a run, got {args.config}")
        name = args.config.removesuffix(".yaml").strip("./").replace("/", "-")
        return config.load(args.config, args.set), args.model_dir if args.model_dir is not None else f"runs/{name}"
    if args.model_dir is not None:
        raise ValueError(
            f"{found} is a run, which stays in its folder: leave --model-dir out, or train {path} for a new one"
        )
    return run_directory.load_config(found, args.set), found
