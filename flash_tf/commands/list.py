"""List the systems, mixers, models, data sources and configs.

Examples:
  flash-tf list
  flash-tf list --json
"""

from flash_tf.commands import gives_json, show


def add_arguments(parser) -> None:
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf import config, model_zoo
    from flash_tf.data.sources import SOURCES
    from flash_tf.layers.feedforward import FEEDFORWARDS
    from flash_tf.layers.mixers import MIXERS
    from flash_tf.models import MODELS

    parts = {"mixers": MIXERS, "feedforwards": FEEDFORWARDS, "models": MODELS, "sources": SOURCES}
    named = {name: registry.names() for name, registry in parts.items()} | {"configs": config.names()}
    found = model_zoo.systems()
    text = "\n".join(f"{name:<14}{f'{chr(10)}{14 * chr(32)}'.join(names)}" for name, names in named.items())
    show({"systems": found, **named} if args.json else f"{model_zoo.as_text(found)}\n\n{text}", args.json)
