"""Write a trained model as a SavedModel for servers.

Examples:
  flash-tf export runs/quickstart exports/quickstart
  flash-tf export runs/quickstart exports/quickstart --precision bfloat16
"""

from flash_tf.commands import gives_json, show, takes_model, takes_threshold, threshold, whole


def add_arguments(parser) -> None:
    takes_model(parser)
    takes_threshold(parser)
    sizes = parser.add_argument_group("signatures")
    sizes.add_argument("--ids-only", action="store_true", help="leave the tokenizer out: signatures take token ids")
    sizes.add_argument("--max-length", type=whole, metavar="N", help="most tokens of a row (default: as in training)")
    sizes.add_argument(
        "--max-new-tokens",
        type=whole,
        metavar="N",
        help="causal models: tokens that `generate` adds (default 64, at most half a row)",
    )
    sizes.add_argument("--top-k", type=whole, metavar="K", help="masked models: tokens for each mask (default 5)")
    files = parser.add_argument_group("files")
    files.add_argument("out", metavar="OUT", help="a new folder, or an older export to replace")
    files.add_argument(
        "--precision",
        choices=("float32", "mixed_bfloat16", "bfloat16"),
        help="default: as in training; bfloat16 halves the size of the weights",
    )
    files.add_argument(
        "--vocabulary-licence", metavar="TEXT", help="a note on the licence for assets.extra/export.json"
    )
    files.add_argument(
        "--jit-compile",
        action="store_true",
        help="for servers with a GPU: XLA compiles `generate` and `decode_step`, once for each batch size",
    )
    files.add_argument("--tflite", action="store_true", help="also write model.tflite, for one row, in float32")
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf import owned_files
    from flash_tf.data import tokenizers
    from flash_tf.exporting import saved_model
    from flash_tf.exporting.graph_tokenizers import check_tokenizer
    from flash_tf.training.restore import restore

    counts = {"new_tokens": args.max_new_tokens, "top_k": args.top_k}
    options = saved_model.Options(
        ids_only=args.ids_only,
        precision=args.precision,
        longest=args.max_length,
        licence=args.vocabulary_licence,
        lite=args.tflite,
        jit_compile=args.jit_compile,
        **{name: value for name, value in counts.items() if value is not None},
    )
    saved_model.check_folder(args.out)  # before the work
    if not args.ids_only and (path := tokenizers.find(owned_files.place(args.model_dir))):
        check_tokenizer(tokenizers.load(path))
    progress = log.progress()
    restored = restore(args.model_dir, progress.line, args.checkpoint, threshold(args))
    kind = restored.config.model["type"].removesuffix("_lm")
    if args.top_k is not None and kind != "masked":
        raise ValueError(f"--top-k is for masked models, and {args.model_dir} has a {kind} one")
    if args.max_new_tokens is not None:
        saved_model.check_generates(restored.model, "--max-new-tokens")
    about = saved_model.export(restored, args.out, options, progress.line)
    show(about if args.json else saved_model.as_text(about, args.out), args.json)
