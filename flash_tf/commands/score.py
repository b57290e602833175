"""Score documents of any length with a trained causal model.

Examples:
  flash-tf score runs/lm book.txt
  flash-tf score runs/lm articles.jsonl.gz --documents key --key text --json
"""

import math

from flash_tf.commands import gives_json, show, takes_model


def add_arguments(parser) -> None:
    takes_model(parser)
    text = parser.add_argument_group("documents")
    text.add_argument("file", metavar="FILE", help="text, or JSON lines; .gz and .xz are unpacked")
    text.add_argument(
        "--documents",
        choices=("file", "line", "key", "heading"),
        default="file",
        help="a document is the whole file (default), a line, the --key of a line's JSON object, or a WikiText article",
    )
    text.add_argument("--key", default="text", metavar="KEY", help="for --documents key (default text)")
    gives_json(parser)


def run(args, log) -> None:
    import tensorflow as tf

    from flash_tf.data.sources.text_files import TextFiles
    from flash_tf.scoring import score
    from flash_tf.training.restore import restore

    if not [path for path in tf.io.gfile.glob(args.file) if not tf.io.gfile.isdir(path)]:
        raise ValueError(f"score needs a text file, and there is no {args.file!r}")
    source = TextFiles(args.file, args.file, args.documents, args.key)
    texts = (text for shard in source.shards("validation") for text in source.documents("validation", shard))
    progress = log.progress()
    found = restore(args.model_dir, progress.line, args.checkpoint)
    rows = []
    for row in score(found.model, found.tokenizer, texts, found.config.data.sequence_length):
        rows.append(row | _perplexities(row))
        if args.json:
            progress.status(f"scored {len(rows):,} documents")
        else:
            show(_line(f"document {len(rows):,}", rows[-1]), as_json=False)
    progress.clear()
    total = {name: sum(row[name] for row in rows) for name in ("log_likelihood", "tokens", "words")}
    total |= _perplexities(total)
    show({"documents": rows, "total": total} if args.json else _line("all", total), args.json)


def _perplexities(row):
    """Per token, and per word of the text: of the same likelihood."""
    return {
        "perplexity": math.exp(-row["log_likelihood"] / row["tokens"]),
        "word_perplexity": math.exp(min(700.0, -row["log_likelihood"] / row["words"])),
    }


def _line(name, row):
    return (
        f"{name:<16}{row['log_likelihood']:,.2f} nats  {row['tokens']:,} tokens  {row['words']:,} words"
        f"  ppl {row['perplexity']:,.2f}  word ppl {row['word_perplexity']:,.2f}"
    )
