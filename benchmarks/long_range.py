"""Trains small classifiers on long texts, byte by byte, as the Long-Range Arena's Text task does: accuracy a mixer.

    python -m benchmarks.long_range reviews --mixers nystromformer linformer mixed_chunk --json text.json

The folder has one folder a class, of `.txt` files; a tenth of them, by the hash of their names, is held out. Model and
protocol are those of Skyformer (arXiv:2111.00035), which TransNormer's Table 6 follows: 2 blocks of width 64 with 2
heads, a feed-forward network of 128, learned positions, a mean over the bytes, dropout 0.1, Adam at 1e-4 with a linear
decay. Rows that the file has are kept. The arena's own data are not read: IMDb's reviews in such folders are its Text.
"""

import argparse
import inspect
import json
import time
import zlib
from pathlib import Path

import numpy as np

from benchmarks import device
from flash_tf.training.progress import Progress

WIDTH, DEPTH, HEADS, HIDDEN, DROPOUT = 64, 2, 2, 128, 0.1
SIZED = {"heads": HEADS, "key_dim": 64}  # options of mixers, where they have them
COLUMNS, WIDTHS = ("mixer", "parameters", "accuracy", "of", "ms a step"), (28, 12, 10, 8, 12)


def main(arguments: list[str] | None = None) -> int:
    """Trains each mixer that the file lacks, and prints the table."""
    args = _parser().parse_args(arguments)
    if min(args.steps, args.batch, args.length) < 1:
        raise ValueError("--steps, --batch and --length must be 1 or more")
    before = json.loads(Path(args.json).read_text())["rows"] if args.json and Path(args.json).exists() else []
    data = Texts(args.data, args.length)
    with device.libraries_in_log("long_range") as console:
        from benchmarks import backends

        packages = ("tensorflow", "keras", "numpy")
        results = device.Results(args, "long_range", device=backends.device_name(), packages=packages)
        for row in before:
            results.add(row)
        progress = Progress(console)
        for mixer in args.mixers:
            if not any(row["mixer"] == mixer for row in before):
                progress.line(f"{mixer}: {args.steps:,} steps of {args.batch} texts of at most {args.length:,} bytes")
                results.add(_train(mixer, data, args, progress))
        print(device.table_line(COLUMNS, WIDTHS))
        for row in results.rows:
            cells = (row["mixer"], f"{row['parameters']:,}", f"{row['accuracy']:.1%}", row["held_out"])
            print(device.table_line((*cells, f"{row['ms_per_step']:.0f}"), WIDTHS))
    return 0


class Texts:
    """Labelled texts as bytes, cut to one length, a tenth held out.

    Args:
      folder: With a folder for each class.
      length: The most bytes of a text that are read.

    Attributes:
      classes: Their names, sorted.
      train, held_out: `(inputs, labels)`, inputs as `Classifier` takes them.

    Raises:
      ValueError: There are fewer than two classes, or one has no text.
    """

    def __init__(self, folder: str, length: int):
        found = {path.name: sorted(path.glob("*.txt")) for path in sorted(Path(folder).iterdir()) if path.is_dir()}
        self.classes = [name for name, files in found.items() if files]
        if len(self.classes) < 2:
            raise ValueError(f"{folder} needs two folders or more with .txt files, one a class, has {self.classes}")
        rows = [(file, label) for label, name in enumerate(self.classes) for file in found[name]]
        out = np.array([zlib.crc32(file.name.encode()) % 10 == 0 for file, _ in rows])
        if out.all() or not out.any():
            raise ValueError(f"{folder} needs more texts: of {len(rows)}, {out.sum()} are held out")
        ids, labels = np.zeros([len(rows), length], "int32"), np.array([label for _, label in rows], "int32")
        real = np.zeros([len(rows), length], bool)
        for i, (file, _) in enumerate(rows):
            text = np.frombuffer(file.read_bytes()[:length], np.uint8)
            ids[i, : len(text)], real[i, : len(text)] = text, True
        part = lambda kept: ({"token_ids": ids[kept], "padding_mask": real[kept]}, labels[kept])  # noqa: E731
        self.train, self.held_out = part(~out), part(out)


def _train(mixer, data, args, progress):
    import keras

    keras.utils.set_random_seed(args.seed)
    model = make(mixer, len(data.classes), args.length)
    rate = keras.optimizers.schedules.PolynomialDecay(args.learning_rate, args.steps, 0.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    (inputs, labels), draw = data.train, np.random.default_rng(args.seed)
    shown = start = None
    for step in range(args.steps):
        rows = draw.integers(0, len(labels), args.batch)
        found = model.train_on_batch({name: x[rows] for name, x in inputs.items()}, labels[rows], return_dict=True)
        if step == 0:
            shown = start = time.perf_counter()  # the first compiles
            model.reset_metrics()
        elif time.perf_counter() - shown > 5:
            shown = time.perf_counter()
            progress.status(f"step {step + 1:,} of {args.steps:,}  loss {found['loss']:.4f}")
    seconds = time.perf_counter() - start
    inputs, labels = data.held_out
    scores = model.predict(inputs, batch_size=args.batch, verbose=0)
    return {
        "mixer": mixer,
        "parameters": model.count_params(),
        "accuracy": float(np.mean(scores.argmax(-1) == labels)),
        "held_out": len(labels),
        "ms_per_step": 1e3 * seconds / max(args.steps - 1, 1),
    }


def make(mixer: str, classes: int, length: int):
    """The classifier of a registered mixer, at the arena's size."""
    from flash_tf.layers.gated_attention_unit import GatedAttentionUnit
    from flash_tf.layers.mixers import MIXERS
    from flash_tf.models.classifier import Classifier

    options = inspect.signature(MIXERS.get(mixer)).parameters
    sized = {name: value for name, value in {**SIZED, "max_length": length}.items() if name in options}
    if gated := issubclass(MIXERS.get(mixer), GatedAttentionUnit):
        sized.pop("heads", None)  # the unit has one
    return Classifier(
        classes,
        hidden=HIDDEN,
        vocabulary_size=256,
        width=WIDTH,
        depth=2 * DEPTH if gated else DEPTH,  # a unit is a block without a feed-forward layer
        mixer={"type": mixer, **sized},
        feedforward=None if gated else {"type": "mlp", "hidden": HIDDEN},
        norm="layer_norm",
        max_length=length,
        dropout=DROPOUT,
    )


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_range", description=__doc__.splitlines()[0])
    parser.add_argument("data", metavar="DIR", help="a folder of text files for each class")
    parser.add_argument("--mixers", nargs="+", default=["self_attention", "mixed_chunk"], metavar="MIXER")
    parser.add_argument("--length", type=int, default=4000, metavar="BYTES", help="of a text (default 4,000)")
    parser.add_argument("--steps", type=int, default=50_000, help="of training (default 50,000)")
    parser.add_argument("--batch", type=int, default=32, metavar="TEXTS", help="of a step (default 32)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, metavar="RATE", help="at first (default 1e-4)")
    parser.add_argument("--seed", type=int, default=0)
    device.takes_result(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
