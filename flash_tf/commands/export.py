"""Write a trained model for servers: a SavedModel with the tokenizer inside."""

from flash_tf.commands import gives_json, show, takes_model


def add_arguments(parser) -> None:
    takes_model(parser)
    parser.add_argument("out", metavar="OUT", help="where to: a new folder, or an older export, which is replaced")
    parser.add_argument(
        "--checkpoint", choices=("best", "newest"), default="best", help="by validation loss (default), or by step"
    )
    parser.add_argument("--ids-only", action="store_true", help="leave the tokenizer out: signatures take ids")
    parser.add_argument(
        "--precision",
        choices=("float32", "mixed_bfloat16", "bfloat16"),
        help="as the training's by default; bfloat16 stores the weights in half the space",
    )
    parser.add_argument("--max-length", type=int, metavar="N", help="most tokens of a row (default the config's)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="what `generate` adds at most (default 64)")
    parser.add_argument("--top-k", type=int, metavar="K", help="tokens for each mask (default 5)")
    parser.add_argument("--vocabulary-licence", metavar="TEXT", help="what assets.extra/export.json says of it")
    parser.add_argument("--tflite", action="store_true", help="write model.tflite too, for one row, in float32")
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf.exporting import saved_model
    from flash_tf.training.restore import restore

    counts = {"new_tokens": args.max_new_tokens, "top_k": args.top_k}
    options = saved_model.Options(
        ids_only=args.ids_only,
        precision=args.precision,
        longest=args.max_length,
        licence=args.vocabulary_licence,
        lite=args.tflite,
        **{name: value for name, value in counts.items() if value is not None},
    )
    saved_model.check_folder(args.out)  # before the work
    progress = log.progress()
    restored = restore(args.model_dir, progress.line, args.checkpoint)
    wrong, kind, other = ("top_k", "causal", "masked") if restored.model.causal else ("new_tokens", "masked", "causal")
    if counts[wrong] is not None:
        option = {"top_k": "--top-k", "new_tokens": "--max-new-tokens"}[wrong]
        raise ValueError(f"{option} goes with {other} models, and that of {args.model_dir} is {kind}")
    about = saved_model.export(restored, args.out, options, progress.line)
    show(about if args.json else saved_model.as_text(about, args.out), args.json)
