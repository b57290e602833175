"""Continue prompts with a trained causal model, and print the text as it comes."""

from flash_tf.commands import gives_json, show, takes_model


def add_arguments(parser) -> None:
    takes_model(parser)
    parser.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="may be repeated: texts then grow together"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="for each prompt, unless its text ends (default 64)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="draw tokens, from logits over T (default greedy)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that reach P together")
    parser.add_argument("--beam", type=int, metavar="W", help="the likeliest of W texts that grow together")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of what is drawn (default 0)")
    gives_json(parser)


def run(args, log) -> None:
    sampler = _sampler(args)
    from flash_tf.training.restore import restore

    model = restore(args.model_dir, log.progress().line).model
    if not model.causal:
        raise ValueError(f"generate needs a causal language model, {args.model_dir} has a {type(model).__name__}")
    options = (args.max_new_tokens, sampler, args.seed)
    if args.json or args.beam is not None or len(args.prompt) > 1:
        texts = model.generate(args.prompt, *options)
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
        raise ValueError(f"--beam draws nothing: it does not go with --{next(iter(drawn)).replace('_', '-')}")
    return BeamSearch(args.beam)
