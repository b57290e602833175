"""Measure a trained model's validation loss and perplexity.

Examples:
  flash-tf evaluate runs/quickstart
  flash-tf evaluate runs/quickstart --checkpoint newest --json
"""

from flash_tf.commands import gives_json, show, takes_model, takes_threshold, threshold


def add_arguments(parser) -> None:
    takes_model(parser)
    takes_threshold(parser)
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf.training import loop

    show(loop.evaluate(args.model_dir, log.progress(), args.checkpoint, threshold(args)), args.json)
