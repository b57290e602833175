"""Reads novels with trained causal models: the perplexity at each position, far beyond the length of their training.

    python -m benchmarks.positions OUT/length-lm-*-45M-*/ --novels novels
    python -m benchmarks.positions flash=OUT/length-lm-flash-2048-45M-0.001-0 gla=… --novels novels

Every *.txt in the folder of `--novels` is a novel. It is tokenized with the run's tokenizer, and cut into as many
stretches of `--tokens` as it has; the rest is not read, nor is a shorter novel. Each stretch follows an end-of-document
token and is read once, in blocks, from an empty state. A row has the perplexity of the tokens in each bucket of
positions, 0 to 256, 256 to 512, and so on by powers of two. Beside it stand the bytes of the decoding state after 1,024
tokens and after all, as `flash-tf describe` counts them.

A model that cannot read so far is named, and the others go on. A run with a row of this commit, device, step, text and
`--tokens` is not read again, so the command may be stopped and started again.
"""

import argparse
import hashlib
import itertools
import math
import time
from pathlib import Path

import numpy as np

from benchmarks import device, in_parallel, result_files
from flash_tf.pictures import records
from flash_tf.registry import mixer_name
from flash_tf.training.progress import Progress

FIRST, SHORT = 256, 1024  # the end of the first bucket; tokens after which the state is counted too
COLUMNS = ("run", "system", "parameters", "n", "stretches", "KiB at 1,024", "KiB at end")
WIDTHS = (30, 18, 13, 7, 11, 14, 12)


def main(arguments: list[str] | None = None) -> int:
    """Reads what the file lacks, and prints a table for each device and text; 1 if a model could not read it."""
    args = _checked(result_files.parse(_parser(), arguments))
    status, rows = in_parallel.measured(args, "positions", _measure)
    print(as_text([row for row in rows if row["tokens"] == args.tokens]))
    return status


def _measure(args, progress):
    from benchmarks import backends
    from flash_tf.training.restore import restore

    novels = _novels(args.novels)
    text = hashlib.sha256("\0".join(novels).encode()).hexdigest()[:12]
    packages = ("tensorflow", "keras", "numpy")
    results = result_files.Results(args, "positions", device=backends.device_name(), packages=packages)
    encoded, status = {}, 0
    for folder, label in args.labels.items():
        try:
            found = restore(folder, progress.line)
            about = {"run": label, "folder": folder, "step": found.step, "tokens": args.tokens, "text": text}
            if results.has(**about):
                continue
            _check_model(found.model, args.tokens)
            if (key := found.tokenizer.fingerprint) not in encoded:
                progress.line(f"{label}: tokenizing {len(novels):,} novels")
                encoded[key] = found.tokenizer.encode(novels)
            stretches, left_out = cut(encoded[key], args.tokens)
            read = {"novels": len(novels) - left_out, "left_out": left_out, "stretches": len(stretches)}
            progress.line(f"{label}: {', '.join(f'{name} {count:,}' for name, count in read.items())}")
            results.add({**about, **read, **_read(found, stretches, args.batch, progress)})
        except Exception as error:
            if not ((full := backends.is_out_of_memory(error)) or isinstance(error, ValueError | OSError)):
                raise
            status, said = 1, f"out of memory with --batch {args.batch}" if full else " ".join(str(error).split())
            progress.line(f"{label}: {said}")
    return status


def _novels(folder):
    """The texts of a folder, in the order of their names."""
    from flash_tf.data.sources import text_files

    if not text_files.sizes(files := f"{folder}/*.txt"):
        raise ValueError(f"--novels needs a folder with *.txt, and {folder} has none")
    source = text_files.TextFiles(files, files)
    return [text for shard in source.shards("validation") for text in source.documents("validation", shard)]


def _check_model(model, tokens):
    """Raises a ValueError unless a model reads so many tokens."""
    if not model.causal:
        raise ValueError(f"it needs a causal language model, got {type(model).__name__}")
    if model.longest is not None and model.longest < tokens:
        raise ValueError(f"the model reads at most {model.longest:,} tokens, got --tokens {tokens}")


def cut(encoded: list[np.ndarray], tokens: int) -> tuple[np.ndarray, int]:
    """The stretches of all novels, int `[stretches, tokens]`, and how many novels are shorter than one, but not all."""
    whole = [ids[: len(ids) // tokens * tokens].reshape(-1, tokens) for ids in encoded]
    stretches, left_out = np.concatenate(whole), sum(not len(one) for one in whole)
    if not len(stretches):
        raise ValueError(f"the longest novel has {max(map(len, encoded)):,} tokens, got --tokens {tokens}")
    return stretches, left_out


def _read(found, stretches, batch, progress):
    start, tokens, model = time.perf_counter(), stretches.shape[1], found.model
    each = nats(model, stretches, found.tokenizer.eos_id, batch, progress)
    buckets = list(itertools.pairwise(edges(tokens)))
    return {
        "system": mixer_name(found.config.model["mixer"]),
        "config": found.config.model,
        "precision": found.config.train.precision,
        "n": found.config.data.sequence_length,
        "parameters": sum(math.prod(v.shape) for v in model.trainable_variables),
        "buckets": buckets,
        "perplexity": [math.exp(min(each[a:b].mean(), 700.0)) for a, b in buckets],
        "state_bytes": {str(n): model.decode_state_bytes(n) for n in (SHORT, tokens)},
        "batch": batch,
        "seconds": time.perf_counter() - start,  # with the programs' compilation
    }


def edges(tokens: int) -> list[int]:
    """The edges of the buckets: 0, powers of two from 256 on, and `tokens`."""
    return [0, *itertools.takewhile(lambda n: n < tokens, (FIRST << i for i in itertools.count())), tokens]


def nats(model, stretches: np.ndarray, first: int, batch: int, progress: Progress) -> np.ndarray:
    """The mean negative log-likelihood at each position of `stretches [many, tokens]`, float64 `[tokens]`.

    A stretch follows the id `first`, and is read from an empty state, `batch` of them together.
    """
    from keras import ops

    from flash_tf.generation.generator import compiled
    from flash_tf.scoring import BLOCK

    def block(ids, labels, state):
        logits, state = model.extend(ids, state)
        return ops.sparse_categorical_crossentropy(labels, ops.cast(logits, "float32"), from_logits=True), state

    many, tokens = stretches.shape
    before = np.pad(stretches[:, :-1], ((0, 0), (1, 0)), constant_values=first)
    batch, total, programs = min(batch, many), np.zeros(tokens), {}
    for done in range(0, many, batch):
        rows = np.minimum(np.arange(done, done + batch), many - 1)  # the last batch is filled up, with rows not counted
        state = model.initial_state(batch, tokens if model.grows else None)
        for start in range(0, tokens, BLOCK):
            progress.status(f"{done:,} of {many:,} stretches", f"{start:,} of {tokens:,} tokens of the next {batch}")
            at = slice(start, start + BLOCK)
            given = [ops.convert_to_tensor(ids[rows, at], "int32") for ids in (before, stretches)]
            if (size := given[0].shape[1]) not in programs:
                programs[size] = compiled(model, block, *given, state)
            found, state = programs[size](*given, state)
            total[at] += ops.convert_to_numpy(found)[: many - done].sum(axis=0, dtype="float64")
    progress.clear()
    return total / many


def as_text(rows: list[dict]) -> str:
    """A table for each device, text and number of tokens: a line for each run, a column for each bucket by its end."""
    tables, groups = [], {}
    for row in rows:
        groups.setdefault((row["device"], row["tokens"], row["text"]), {})[row["run"]] = row  # the newest
    for (where, tokens, text), of_run in groups.items():
        lines = [[*COLUMNS, *(f"to {end:,}" for end in edges(tokens)[1:])]]
        for row in of_run.values():
            cells = [row["run"], row["system"], *(f"{row[name]:,}" for name in ("parameters", "n", "stretches"))]
            cells += [f"{row['state_bytes'][str(n)] / 2**10:,.0f}" for n in (SHORT, tokens)]
            lines.append([*cells, *(f"{x:.2f}" for x in row["perplexity"])])
        heading = f"perplexity by position: novels {text}, stretches of {tokens:,} tokens, on {where}"
        widths = (*WIDTHS, *[11] * (len(lines[0]) - len(WIDTHS)))
        tables.append("\n".join([heading, *(device.table_line(line, widths) for line in lines)]))
    return "\n\n".join(tables)


def _checked(args):
    if wrong := [name for name in ("tokens", "batch") if getattr(args, name) < 1]:
        raise ValueError(f"--{wrong[0]} must be 1 or more, got {getattr(args, wrong[0])}")
    if not args.table and not (args.runs and args.novels):
        raise ValueError("RUN and --novels are needed, but for --table")
    parts = [("", "", run) if Path(run).exists() else run.rpartition("=") for run in args.runs]
    names = records.short_names([folder for label, _, folder in parts if not label])
    args.labels = {folder: label or names[folder] for label, _, folder in parts}
    if len({*args.labels.values()}) < len(args.labels):
        raise ValueError("two runs have one name: give them other ones, as LABEL=RUN")
    return args


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.positions", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", metavar="[LABEL=]RUN", help="run directories of flash-tf train")
    parser.add_argument("--novels", metavar="DIR", help="the folder with *.txt")
    parser.add_argument("--tokens", type=int, default=32_768, metavar="N", help="of a stretch (default 32,768)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="stretches read together (default 8)")
    parser.add_argument("--table", action="store_true", help="read nothing")
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
