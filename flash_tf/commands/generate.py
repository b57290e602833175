"""Continue prompts with a trained causal model.

Examples:
  flash-tf generate runs/lm --prompt "The sea was"
  flash-tf generate runs/lm --prompt "The sea was" --temperature 0.8 --top-p 0.9
"""

from flash_tf.commands import finite, gives_json, show, takes_model, utf8, whole


def add_arguments(parser) -> None:
    takes_model(parser)
    text = parser.add_argument_group("text")
    text.add_argument(
        "--prompt",
        action="append",
        required=True,
        type=utf8,
        metavar="TEXT",
        help="may be repeated; texts then grow together",
    )
    text.add_argument(
        "--max-new-tokens",
        type=whole,
        default=64,
        metavar="N",
        help="most tokens to add to each prompt (default 64)",
    )
    drawing = parser.add_argument_group("sampling", "Without these options each token is the likeliest one.")
    drawing.add_argument("--temperature", type=finite, metavar="T", help="sample from the logits divided by T")
    drawing.add_argument("--top-k", type=whole, metavar="K", help="sample from the K likeliest tokens")
    drawing.add_argument(
        "--top-p", type=finite, metavar="P", help="sample from the likeliest tokens whose probabilities reach P"
    )
    drawing.add_argument("--seed", type=whole, default=0, metavar="S", help="seed of the samples (default 0)")
    drawing.add_argument("--beam", type=whole, metavar="W", help="beam search of width W; does not sample")
    gives_json(parser)


def run(args, log) -> None:
    sampler = _sampler(args)
    from flash_tf.training.restore import restore

    progress = log.progress()
    model = restore(args.model_dir, progress.line, args.checkpoint).model
    if not model.causal:
        raise ValueError(f"generate needs a causal language model, {args.model_dir} has a {type(model).__name__}")
    options = (args.max_new_tokens, sampler, args.seed)
    if args.json or args.beam is not None or len(args.prompt) > 1:
        progress.status(f"generating {args.max_new_tokens:,} tokens for {len(args.prompt):,} prompts")
        texts = model.generate(args.prompt, *options)
        progress.clear()
        rows = [{"prompt": prompt, "text": text} for prompt, text in zip(args.prompt, texts, strict=True)]
        show({"texts": rows} if args.json else "\n\n".join(texts), args.json)
    else:
        _print_live(model, args.prompt[0], options)


def _print_live(model, prompt, options):
    pieces = model.stream(prompt, *options)
    print(model.tokenizer.decode(model.tokenize([prompt])[0]), end="", flush=True)  # noqa: T201
    for piece in pieces:
        print(piece, end="", flush=True)  # noqa: T201
    print()  # noqa: T201


def _sampler(args):
    from flash_tf.generation import GREEDY, BeamSearch, Sampler

    drawn = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    if args.beam is None:
        return Sampler(**drawn) if drawn else GREEDY
    if drawn:
        raise ValueError(f"--beam does not sample, so it cannot be used with --{next(iter(drawn)).replace('_', '-')}")
    return BeamSearch(args.beam)
