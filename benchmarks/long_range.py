"""Trains small classifiers of long texts, byte by byte, as the Long-Range Arena does: accuracy of each system.

    python -m benchmarks.long_range reviews --systems transformer transnormer_t2
    python -m benchmarks.long_range citations --task retrieval --systems flash

The data folder has one folder for each class, with one file for each text. The bytes of a file are its tokens: letters
in Text, symbols in ListOps, gray values of pixels in Image and Pathfinder. In Retrieval a text is a pair of files,
NAME.1.txt and NAME.2.txt. A tenth of the texts, chosen by the hash of their names, is held out. The arena's own files
are not read: put IMDb's reviews into such folders for Text.

Systems are the rows of TransNormer's Table 6, named as in `flash-tf list`. `long_range.yaml` defines them, and each
task's length, batch and learning rate. Protocol: Adam with a linear decay, 50,000 steps. A system that has a row of
this commit, device and setting is not trained again, so the command may be stopped and started again.
"""

import argparse
import math
import time
import zlib
from pathlib import Path

import numpy as np
import yaml

from benchmarks import device, result_files
from benchmarks.systems import OF_LENGTH
from flash_tf.registry import hint
from flash_tf.training.progress import Progress, duration

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
PAIRED = "retrieval"  # the task whose texts are pairs
SETTINGS = ("length", "steps", "batch", "learning_rate", "seed")
COLUMNS, WIDTHS = ("task", "system", "parameters", "accuracy", "of", "ms a step"), (12, 16, 12, 10, 8, 12)


def main(arguments: list[str] | None = None) -> int:
    """Trains each system that the file lacks, and prints the table of this commit."""
    args = _checked(result_files.parse(_parser(), arguments))
    data = Texts(args.data, args.length, pairs=args.task == PAIRED)
    with device.libraries_in_log() as console:
        from benchmarks import backends

        packages = ("tensorflow", "keras", "numpy")
        where = backends.device_name()
        asked = {"task": args.task, **{name: getattr(args, name) for name in SETTINGS}}
        results = result_files.Results(args, "long_range", device=where, packages=packages)
        progress = Progress(console)
        progress.line(f"{args.data}: {data}")
        for system in args.systems:
            if not results.has(system=system, **asked):
                progress.line(f"{system}: {args.steps:,} steps of {args.batch}, at most {args.length:,} bytes a text")
                results.add({"system": system, **asked, **_train(system, data, args, progress)})
        print(device.table_line(COLUMNS, WIDTHS))
        for row in [*results.before, *results.rows]:
            cells = (row["task"], row["system"].rjust(WIDTHS[1]), f"{row['parameters']:,}", f"{row['accuracy']:.1%}")
            print(device.table_line((*cells, f"{row['held_out']:,}", f"{row['ms_per_step']:.0f}"), WIDTHS))
    return 0


class Texts:
    """Labelled texts, or pairs of texts, as bytes cut to one length. A tenth is held out.

    Args:
      folder: Holds a folder for each class.
      length: At most this many bytes of a text are read.
      pairs: Whether two files, `NAME.1.txt` and `NAME.2.txt`, are one example. Any suffix may replace `.txt`.

    Attributes:
      classes: Names of the classes, sorted.
      labels: The index of each example's class, int32 [examples].
      train, held_out: Indices of examples.

    Raises:
      ValueError: Fewer than two classes have files, a file is empty or has no partner, or no text is held out.
    """

    def __init__(self, folder: str, length: int, pairs: bool = False):
        found = {path.name: _examples(path, pairs) for path in sorted(Path(folder).iterdir()) if path.is_dir()}
        self.classes = [name for name, examples in found.items() if examples]
        if len(self.classes) < 2:
            raise ValueError(f"{folder} needs two folders or more with files, one a class, has {self.classes}")
        rows = [(files, label) for label, name in enumerate(self.classes) for files in found[name]]
        self.labels = np.array([label for _, label in rows], "int32")
        self._bytes = np.zeros([len(rows), 1 + pairs, length], "uint8")  # int32 would take four times as much
        self._lengths = np.zeros([len(rows), 1 + pairs], "int32")
        for i, (files, _) in enumerate(rows):
            for j, file in enumerate(files):
                text = np.frombuffer(_start(file, length), np.uint8)
                self._bytes[i, j, : len(text)], self._lengths[i, j] = text, len(text)
        out = np.array([zlib.crc32(files[0].name.encode()) % 10 == 0 for files, _ in rows])
        if out.all() or not out.any():
            raise ValueError(f"{folder} needs more texts: of {len(rows)}, {out.sum()} are held out")
        self.train, self.held_out = np.flatnonzero(~out), np.flatnonzero(out)

    def __str__(self):
        commonest = np.bincount(self.labels[self.held_out]).max() / len(self.held_out)
        return (
            f"{len(self.train):,} to train on, {len(self.held_out):,} held out; "
            f"{len(self.classes)} classes; the commonest has {commonest:.1%} of the held-out texts"
        )

    def batch(self, rows):
        """The examples' `(inputs, labels)`; the inputs fit `Classifier`, or `Matcher` for pairs."""
        real = np.arange(self._bytes.shape[-1]) < self._lengths[rows][..., None]
        one = 0 if self._bytes.shape[1] == 1 else slice(None)
        inputs = {"token_ids": self._bytes[rows].astype("int32")[:, one], "padding_mask": real[:, one]}
        return inputs, self.labels[rows]


def _examples(folder, pairs):
    """A class's examples, each a tuple of one file or two."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if not pairs:
        return [(file,) for file in files]
    firsts = [file for file in files if file.stem.endswith(".1")]
    found = [(file, file.with_name(f"{file.stem[:-1]}2{file.suffix}")) for file in firsts]
    if odd := sorted({*files} ^ {file for pair in found for file in pair}):
        wrong = "has no partner" if odd[0] in files else "is missing"
        raise ValueError(f"{folder} needs pairs of files, NAME.1.txt and NAME.2.txt: {odd[0].name} {wrong}")
    return found


def _start(file, length):
    with file.open("rb") as opened:
        text = opened.read(length)
    if not text:
        raise ValueError(f"{file} is empty: a text needs at least one byte")
    return text


def _train(system, data, args, progress):
    import keras

    keras.utils.set_random_seed(args.seed)
    model = make(system, len(data.classes), args.length, pairs=args.task == PAIRED)
    rate = keras.optimizers.schedules.PolynomialDecay(args.learning_rate, args.steps, 0.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    draw = np.random.default_rng(args.seed)
    shown = start = None
    lately = []  # the metrics of each step since the last line, as Keras returns them for one step at a time
    for step in range(1, args.steps + 1):
        lately.append(model.train_on_batch(*data.batch(draw.choice(data.train, args.batch))))
        if step == 1:
            shown = start = time.perf_counter()  # the first compiles
        elif time.perf_counter() - shown > 5:
            shown = time.perf_counter()
            left = duration((shown - start) / (step - 1) * (args.steps - step))
            found, accuracy = np.mean(lately, axis=0)
            figures = (f"loss {found:.4f}", f"accuracy {accuracy:.1%}", f"{left} left")
            progress.status(f"step {step:,}/{args.steps:,}", *figures)
            lately.clear()
    seconds = time.perf_counter() - start
    right = 0
    for first in range(0, len(data.held_out), args.batch):
        inputs, labels = data.batch(data.held_out[first : first + args.batch])
        right += int(np.sum(model.predict_on_batch(inputs).argmax(-1) == labels))
    return {
        "parameters": sum(math.prod(v.shape) for v in model.trainable_variables),
        "accuracy": right / len(data.held_out),
        "held_out": len(data.held_out),
        "ms_per_step": 1e3 * seconds / max(args.steps - 1, 1),
    }


def make(system: str, classes: int, length: int, pairs: bool = False):
    """A system's model for texts of at most `length` bytes: a `Classifier`, or a `Matcher` for pairs."""
    from flash_tf.models.classifier import Classifier
    from flash_tf.models.language_model import listed
    from flash_tf.models.matcher import Matcher

    model = {**TABLE["model"], **TABLE["systems"][system]}
    mixers = [{**mixer, **{k: length for k in OF_LENGTH if k in mixer}} for mixer in listed(model["mixer"])]
    cls = Matcher if pairs else Classifier
    return cls(classes, **{**model, "mixer": mixers}, vocabulary_size=256, max_length=length)


def _checked(args):
    """The arguments, with the task's sizes as defaults."""
    for name, value in TABLE["tasks"][args.task].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(args.steps, args.batch, args.length) < 1 or args.learning_rate <= 0:
        raise ValueError("--steps, --batch and --length must be 1 or more, --learning-rate above 0")
    if unknown := [name for name in args.systems if name not in TABLE["systems"]]:
        near = hint(unknown[0], TABLE["systems"]) or "."
        raise ValueError(f"no system is called {unknown[0]!r}{near} There are: {', '.join(TABLE['systems'])}")
    return args


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_range", description=__doc__.splitlines()[0])
    parser.add_argument("data", metavar="DIR", help="holds a folder of files for each class")
    parser.add_argument("--systems", nargs="+", default=["transformer", "flash"], metavar="SYSTEM")
    parser.add_argument(
        "--task", choices=TABLE["tasks"], default="text", help="the task whose sizes are used (default text)"
    )
    parser.add_argument("--length", type=int, metavar="BYTES", help="of a text, at most (default: the task's)")
    parser.add_argument("--steps", type=int, default=50_000, help="training steps (default 50,000)")
    parser.add_argument("--batch", type=int, metavar="TEXTS", help="texts in a step (default: the task's)")
    parser.add_argument(
        "--learning-rate", type=float, metavar="RATE", help="initial learning rate (default: the task's)"
    )
    parser.add_argument("--seed", type=int, default=0)
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
