"""Average the weights of a run's last checkpoints into a new model.

Examples:
  flash-tf average runs/quickstart
  flash-tf average runs/lm --last 5 --out runs/lm-average --json
"""

from flash_tf.commands import gives_json, show, whole


def add_arguments(parser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("model_dir", metavar="RUN", help="the folder of the run")
    group.add_argument("--last", type=whole, default=3, metavar="K", help="the number of checkpoints (default 3)")
    gives_json(parser, "write the model directory here (default RUN/average)")


def run(args, log) -> None:
    from flash_tf.training.average import average

    out = args.out or f"{args.model_dir}/average"
    steps = average(args.model_dir, args.last, out, log.progress().line)
    text = f"the mean of the weights of steps {', '.join(f'{step:,}' for step in reversed(steps))} is in {out}"
    show({"steps": steps, "model_dir": out} if args.json else text, args.json)
