"""Measure a trained model's validation loss and perplexity.

Examples:
  flash-tf evaluate runs/quickstart
  flash-tf evaluate runs/quickstart --checkpoint newest --json
"""

from flash_tf.commands import gives_json, show, takes_model


def add_arguments(parser) -> None:
    takes_model(parser)
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf.training import loop

    show(loop.evaluate(args.model_dir, log.progress(), args.checkpoint), args.json)
