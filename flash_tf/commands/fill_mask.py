"""Fill each <mask> of a text with the likeliest tokens.

Examples:
  flash-tf fill-mask runs/quickstart "for i in <mask>(10):"
  flash-tf fill-mask runs/quickstart "import <mask>" --top-k 10 --json
"""

from flash_tf.commands import gives_json, show, takes_model


def add_arguments(parser) -> None:
    takes_model(parser)
    text = parser.add_argument_group("text")
    text.add_argument("text", metavar="TEXT", help="a text with <mask> for each missing token")
    text.add_argument("--top-k", type=int, default=5, metavar="K", help="tokens for each mask (default 5)")
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf.filling import fill_mask
    from flash_tf.training.restore import restore

    run = restore(args.model_dir, log.progress().line, args.checkpoint)
    longest = run.config.data.sequence_length
    masks = fill_mask(run.model, run.tokenizer, args.text, top_k=args.top_k, max_tokens=longest)
    rows = [f"{c['probability']:6.1%}  {c['token']:<16}{c['text']}" for mask in masks for c in mask]
    show({"masks": masks} if args.json else "\n".join(rows), args.json)
