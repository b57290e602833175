"""Show the parameters, FLOPs and memory of a config.

Examples:
  flash-tf describe mlm_c4/flash
  flash-tf describe quickstart --set model.depth=8 --json
"""

from flash_tf.commands import gives_json, show, takes_config


def add_arguments(parser) -> None:
    takes_config(parser)
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf import config, model_stats
    from flash_tf.training import modelling

    experiment = modelling.with_masking(config.load(args.config, args.set))
    with model_stats.without_weights():
        model = modelling.make_model(experiment)
        described = model_stats.describe(experiment, model, modelling.predicted(experiment))
    show(described if args.json else model_stats.as_text(described), args.json)
