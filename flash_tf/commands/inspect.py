"""Draw the attention maps of a trained model on a text.

Examples:
  flash-tf inspect runs/quickstart --text "for i in <mask>(10):"
  flash-tf inspect runs/quickstart --text "import os, sys" --layer 0 --out maps
"""

from flash_tf.commands import gives_json, show, takes_model, utf8, whole


def add_arguments(parser) -> None:
    takes_model(parser)
    maps = parser.add_argument_group("maps")
    maps.add_argument(
        "--text", required=True, type=utf8, help="the text to read; a masked model takes <mask> as a mask"
    )
    maps.add_argument(
        "--layer", type=whole, action="append", default=[], metavar="I", help="draw only this layer; may be repeated"
    )
    maps.add_argument("--start", type=whole, default=0, metavar="I", help="the first token on the axes (default 0)")
    maps.add_argument("--tokens", type=whole, metavar="N", help="tokens on the axes, 40 at most")
    gives_json(parser, "write the pictures here (default RUN/pictures)")


def run(args, log) -> None:
    from flash_tf import owned_files, pictures

    pictures.check_matplotlib()
    from flash_tf.pictures import inspection, page
    from flash_tf.training.restore import restore

    run = restore(args.model_dir, log.progress().line, args.checkpoint)
    out = args.out or (f"{args.model_dir}/pictures" if owned_files.is_local(args.model_dir) else "pictures")
    out = str(owned_files.local(out, "flash-tf inspect"))  # before the work
    longest = run.config.data.sequence_length
    chosen = {"start": args.start, "tokens": args.tokens, "layers": args.layer}
    found = inspection.read(run.model, run.tokenizer, args.text, longest=longest, **chosen)
    files = page.write(out, "inspect", found.html(f"{args.model_dir}, step {run.step:,}"), found.pictures)
    text = "\n".join([found.text(), "", *files])
    show({"step": run.step, **found.as_dict(), "files": files} if args.json else text, args.json)
