"""Fill each <mask> of one or more texts with the likeliest tokens.

Examples:
  flash-tf fill-mask runs/quickstart "for i in <mask>(10):"
  flash-tf fill-mask runs/quickstart "import <mask>" "a = <mask>" --json
"""

import textwrap

from flash_tf.commands import gives_json, show, takes_model, utf8, whole


def add_arguments(parser) -> None:
    takes_model(parser)
    text = parser.add_argument_group("text")
    text.add_argument("texts", metavar="TEXT", nargs="+", type=utf8, help="a text with <mask> for each missing token")
    text.add_argument("--top-k", type=whole, default=5, metavar="K", help="tokens for each mask (default 5)")
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf.filling import fill_mask
    from flash_tf.training.restore import restore

    run = restore(args.model_dir, log.progress().line, args.checkpoint)
    longest = run.config.data.sequence_length
    found = [fill_mask(run.model, run.tokenizer, text, top_k=args.top_k, max_tokens=longest) for text in args.texts]
    if args.json:
        show({"masks": [mask for masks in found for mask in masks]}, True)
    else:
        lines = (line for text, masks in zip(args.texts, found, strict=True) for line in _lines(text, masks))
        show("\n".join(lines), False)


def _lines(text, masks):
    """The text, and a paragraph for each of its masks: the tokens and their probabilities, likeliest first."""
    yield text
    for mask in masks:
        # A line must not end inside an entry, so the blank there is another character meanwhile.
        entries = (f"{c['token'].lstrip('▁') or '▁'}\0{c['probability']:.1%}" for c in mask)
        lines = textwrap.wrap("   ".join(entries), 76, break_long_words=False, break_on_hyphens=False)
        yield from (f"    {line}".replace("\0", " ") for line in lines)
