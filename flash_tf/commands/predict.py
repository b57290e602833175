"""Predict the labels or answers of new examples.

Examples:
  flash-tf predict runs/sentiment reviews.jsonl
  flash-tf predict runs/sentiment reviews.tsv --out predictions.jsonl
"""

import glob
import json
import os

from flash_tf.commands import takes_model, takes_threshold, threshold, whole

WRITER = "flash-tf predict"


def add_arguments(parser) -> None:
    takes_model(parser)
    takes_threshold(parser)
    group = parser.add_argument_group("examples")
    group.add_argument("file", metavar="FILE", help="examples as in training, .jsonl, .tsv or .parquet; without labels")
    group.add_argument(
        "--max-new-tokens",
        type=whole,
        metavar="N",
        help="the most tokens of an answer to a prompt (default 64, at most half a row)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="FILE", help="write the JSON lines here, and print none")


def run(args, log) -> None:
    from flash_tf import owned_files
    from flash_tf.data.example_formats import format_of
    from flash_tf.data.rows import placed
    from flash_tf.data.sources.example_files import ExampleFiles
    from flash_tf.training.predict import predict
    from flash_tf.training.restore import restore

    if not os.path.isfile(args.file):
        raise ValueError(f"predict needs a file of examples, and there is no {args.file!r}")
    format_of(args.file)
    folder, name = os.path.split(args.out or "")
    if args.out is not None:  # before the work
        if not name or os.path.isdir(args.out):
            raise ValueError(f"--out needs the name of a file, got {args.out!r}")
        owned_files.check(folder or ".", [name], WRITER)
    trained = restore(args.model_dir, log.progress().line, args.checkpoint, threshold(args))
    if args.max_new_tokens is not None and not trained.model.causal:
        raise ValueError(f"--max-new-tokens is for answers to prompts, and {args.model_dir} has no causal model")
    path, keys = glob.escape(args.file), trained.config.data.source.get("keys")
    examples = placed(ExampleFiles(path, path, keys), "validation", args.file)
    found = predict(trained, examples, args.max_new_tokens)
    lines = (json.dumps(one, ensure_ascii=False) for one in found)
    if args.out is None:
        for line in lines:
            print(line)  # noqa: T201
        return
    written = "".join(f"{line}\n" for line in lines)
    owned_files.write(folder or ".", {name: written.encode("utf-8", "backslashreplace")}, WRITER)
