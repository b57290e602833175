"""Predict the labels or answers of new examples.

Examples:
  flash-tf predict runs/sentiment reviews.jsonl
  flash-tf predict runs/sentiment reviews.tsv --out predictions.jsonl
"""

import glob
import json
import os

from flash_tf.commands import takes_model

WRITER = "flash-tf predict"


def add_arguments(parser) -> None:
    takes_model(parser)
    group = parser.add_argument_group("examples")
    group.add_argument("file", metavar="FILE", help="examples as in training, .jsonl, .tsv or .parquet; without labels")
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
    source, shard = ExampleFiles(glob.escape(args.file), glob.escape(args.file)), args.file
    format_of(shard)
    folder, name = os.path.split(args.out or "")
    if args.out is not None:  # before the work
        owned_files.check(folder or ".", [name], WRITER)
    trained = restore(args.model_dir, log.progress().line, args.checkpoint)
    lines = (json.dumps(found, ensure_ascii=False) for found in predict(trained, placed(source, "validation", shard)))
    if args.out is None:
        for line in lines:
            print(line)  # noqa: T201
        return
    owned_files.write(folder or ".", {name: "".join(f"{line}\n" for line in lines).encode()}, WRITER)
