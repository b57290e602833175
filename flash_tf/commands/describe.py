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
    from flash_tf.training import modelling, preflight

    experiment, model = preflight.check_values(config.load(args.config, args.set))
    described = model_stats.describe(experiment, model, modelling.predicted(experiment))
    show(described if args.json else model_stats.as_text(described), args.json)
    if lacking := preflight.missing(experiment, model):
        log.progress().line(f"this machine lacks what training needs: {'; '.join(dict.fromkeys(lacking))}")
