"""The mixers, models, sources and configs that there are."""

from flash_tf.commands import gives_json, show


def add_arguments(parser) -> None:
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf import config
    from flash_tf.data.sources import SOURCES
    from flash_tf.layers.feedforward import FEEDFORWARDS
    from flash_tf.layers.mixers import MIXERS
    from flash_tf.models import MODELS

    parts = {"mixers": MIXERS, "feedforwards": FEEDFORWARDS, "models": MODELS, "sources": SOURCES}
    found = {name: registry.names() for name, registry in parts.items()} | {"configs": config.names()}
    text = "\n".join(f"{name:<14}{f'{chr(10)}{14 * chr(32)}'.join(names)}" for name, names in found.items())
    show(found if args.json else text, args.json)
