"""Validation loss and perplexities of a trained model."""

from flash_tf.commands import gives_json, show, takes_model


def add_arguments(parser) -> None:
    takes_model(parser)
    parser.add_argument(
        "--checkpoint", choices=("best", "newest"), default="best", help="by validation loss (default), or by step"
    )
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf.training import loop

    show(loop.evaluate(args.model_dir, log.progress(), args.checkpoint), args.json)
