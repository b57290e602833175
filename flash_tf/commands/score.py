"""Score documents, or continuations of prefixes, with a trained causal model.

Examples:
  flash-tf score runs/lm articles.jsonl.gz --documents key --key text --json
  flash-tf score runs/lm pairs.jsonl --conditional
"""

from flash_tf.commands import gives_json, show, takes_model, whole

SUMMED = ("log_likelihood", "tokens", "words", "characters", "bytes")


def add_arguments(parser) -> None:
    takes_model(parser)
    text = parser.add_argument_group("texts")
    text.add_argument("file", metavar="FILE", help="text, or JSON lines; .gz and .xz are unpacked")
    kind = text.add_mutually_exclusive_group()
    kind.add_argument(
        "--documents",
        choices=("file", "line", "key", "heading"),
        default="file",
        help="a document is the whole file (default), a line, the --key of a line's JSON object, or a WikiText article",
    )
    kind.add_argument(
        "--conditional",
        action="store_true",
        help="each line is a JSON object with a prefix and a continuation: score the continuation after the prefix",
    )
    text.add_argument("--key", metavar="KEY", help="for --documents key (default text)")
    read = parser.add_argument_group("windows")
    read.add_argument(
        "--window",
        type=whole,
        metavar="N",
        help="the most tokens read together (default: the training length if the model has a cache or learned "
        "positions, else all)",
    )
    read.add_argument(
        "--stride", type=whole, metavar="N", help="tokens from one window to the next (default: the window)"
    )
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf import owned_files
    from flash_tf.data.sources import text_files
    from flash_tf.scoring import Scorer, default_window
    from flash_tf.training.restore import restore

    if args.key is not None and (args.conditional or args.documents != "key"):
        raise ValueError(f"--key {args.key} is for --documents key")
    if not text_files.sizes(owned_files.reachable(args.file)):
        raise ValueError(f"score needs a text file, and there is no {args.file!r}")
    texts = _pairs(args.file) if args.conditional else _documents(args)
    progress = log.progress()
    found = restore(args.model_dir, progress.line, args.checkpoint)
    default = default_window(found.model, found.config.data.sequence_length)
    window = default if args.window is None else args.window
    scorer = Scorer(found.model, found.tokenizer, window, args.stride)
    (_score_pairs if args.conditional else _score_documents)(scorer, texts, args.json, progress)


def _documents(args):
    from flash_tf.data.sources.text_files import TextFiles

    source = TextFiles(args.file, args.file, args.documents, args.key)
    return (text for shard in source.shards("validation") for text in source.documents("validation", shard))


def _pairs(file):
    from flash_tf.data.sources.text_files import json_lines

    if not (pairs := list(json_lines(file, ("prefix", "continuation")))):
        raise ValueError(f"score needs lines with a prefix and a continuation, and {file!r} has none")
    return pairs


def _score_documents(scorer, texts, as_json, progress):
    from flash_tf.scoring import perplexities

    rows = []
    for row in scorer.documents(texts):
        rows.append(row | perplexities(row))
        if as_json:
            progress.status(f"scored {len(rows):,} documents")
        else:
            show(_line(f"document {len(rows):,}", rows[-1]), as_json=False)
    progress.clear()
    total = {name: sum(row[name] for row in rows) for name in SUMMED}
    total |= perplexities(total)
    show({"documents": rows, "total": total} if as_json else _line("all", total), as_json)


def _score_pairs(scorer, pairs, as_json, progress):
    progress.status(f"scoring {len(pairs):,} continuations")
    rows = scorer.continuations(pairs)
    progress.clear()
    total = {name: sum(row[name] for row in rows) for name in ("log_likelihood", "tokens", "greedy")}
    if as_json:
        return show({"continuations": rows, "total": {"continuations": len(rows), **total}}, as_json)
    for number, row in enumerate(rows, 1):
        show(f"{_start(f'continuation {number:,}', row)}{'  greedy' if row['greedy'] else ''}", as_json)
    show(f"{_start('all', total)}  {total['greedy']:,} of {len(rows):,} greedy", as_json)


def _start(name, row):
    return f"{name:<16}{row['log_likelihood']:,.2f} nats  {row['tokens']:,} tokens"


def _line(name, row):
    return (
        f"{_start(name, row)}  {row['words']:,} words  ppl {row['perplexity']:,.2f}"
        f"  word ppl {row['word_perplexity']:,.2f}  byte ppl {row['byte_perplexity']:,.4f}"
        f"  {row['bits_per_character']:,.4f} bits per character"
    )
