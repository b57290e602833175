"""Draw what the layers of a trained model look at in a text."""

from pathlib import Path

from flash_tf.commands import gives_json, show, takes_model


def add_arguments(parser) -> None:
    takes_model(parser)
    parser.add_argument("--text", required=True, help="what the model reads; <mask> is a mask to a masked model")
    parser.add_argument("--start", type=int, default=0, metavar="I", help="first token that maps name (default 0)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens that maps name, 40 at most")
    parser.add_argument(
        "--layer", type=int, action="append", default=[], metavar="I", help="draw this layer; may be repeated"
    )
    parser.add_argument(
        "--checkpoint", choices=("best", "newest"), default="best", help="by validation loss (default), or by step"
    )
    parser.add_argument("--out", metavar="DIR", help="where the pictures go; default MODEL_DIR/pictures")
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf import pictures

    pictures.check_matplotlib()
    from flash_tf.pictures import page, report
    from flash_tf.training.restore import restore

    run = restore(args.model_dir, log.progress().line, args.checkpoint)
    out = args.out or ("pictures" if "://" in args.model_dir else f"{args.model_dir}/pictures")
    page.folder(out)
    longest = run.config.data.sequence_length
    chosen = {"start": args.start, "tokens": args.tokens, "layers": args.layer}
    found = report.read(run.model, run.tokenizer, args.text, longest=longest, **chosen)
    files = page.write(out, "inspect", found.html(f"{args.model_dir}, step {run.step:,}"), found.pictures)
    for file in set(page.folder(out).glob("inspect_layer_*.png")) - {Path(file) for file in files}:
        file.unlink()  # of another text, or of layers that were not asked for
    text = "\n".join([found.text(), "", *files])
    show({"step": run.step, **found.as_dict(), "files": files} if args.json else text, args.json)
