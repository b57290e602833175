"""Times `flash-tf prepare`, the reading of what it wrote, and finding a place among many files, on a CPU.

python -m benchmarks.prepared CONFIG OUT
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import device, result_files
from flash_tf.data.packing import Packing
from flash_tf.data.prepared import FORMAT, MANIFEST, Field, Layout, Prepared

STEP, BATCH, BATCHES = 100_000, 512, 400
ABOUT = {"tokenizer": "none", "source": {}, "identity": "none", "counts_words": False}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepared", description=__doc__.splitlines()[0])
    parser.add_argument("config", metavar="CONFIG", help="a config whose source is there")
    parser.add_argument("out", metavar="OUT", help="a new folder for the prepared text")
    result_files.add_options(parser)
    args = result_files.parse(parser, arguments)
    packages = ("numpy", "tensorflow", "tensorflow-text", "apache-beam")
    results = result_files.Results(args, "prepared", device=device.cpu(), packages=packages)
    for row in (prepared(args.config, args.out), *read(args.out), *places()):
        results.add(row)
        print(json.dumps(row))
    return 0


def prepared(config: str, out: str) -> dict:
    """The command in processes of its own, with TensorFlow's start."""
    begun, before = time.perf_counter(), _children()
    command = [sys.executable, "-m", "flash_tf.cli", "prepare", config, "--out", out, "--json"]
    done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    seconds, cpu = time.perf_counter() - begun, _children() - before
    tokens = done["train_tokens"] + done["validation_tokens"]
    size = sum(path.stat().st_size for path in Path(out).rglob("*") if path.is_file())
    return {
        "what": "prepare",
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "tokens_per_cpu_second": round(tokens / cpu),
        "bytes_per_token": round(size / tokens, 3),
    }


def read(out: str) -> list[dict]:
    """Batches of the training split, from the disk's cache, by each reader and by one host of eight."""
    split = Prepared(out).splits["train"]
    steps = range(BATCHES)
    numpy = [("NumPy", 1, lambda: sum(split.batch(BATCH * i, BATCH, 1)["tokens"].size for i in steps))]
    graph = [("tf.data", hosts, lambda hosts=hosts: _through(split, hosts)) for hosts in (1, 8)]
    rows = []
    for reader, hosts, reads in [*numpy, *graph]:
        reads()
        begun, before = time.perf_counter(), time.process_time()
        tokens = reads()
        seconds, cpu = time.perf_counter() - begun, time.process_time() - before
        rates = {"tokens_per_cpu_second": round(tokens / cpu), "tokens_per_second": round(tokens / seconds)}
        rows.append({"what": "read", "reader": reader, "hosts": hosts, "tokens": tokens, **rates})
    return rows


def _through(split, hosts):
    from flash_tf.data.prepared_input import PreparedStream

    dataset = PreparedStream(split, seed=1, limit=BATCH * BATCHES).dataset(0, BATCH, hosts, 0)
    return sum(batch["tokens"].size for batch in dataset.as_numpy_iterator())


def places() -> list[dict]:
    """From the manifest to the first batch of step 100,000, among a thousand files and among a million."""
    from flash_tf.data.prepared_input import PreparedStream

    rows = []
    for files in (1000, 10**6):
        with tempfile.TemporaryDirectory() as folder:
            position = STEP * BATCH
            _write(folder, files, position)
            begun = time.perf_counter()
            split = Prepared(folder).splits["train"]
            known = time.perf_counter()
            split.batch(position, BATCH, 1)
            by_numpy = time.perf_counter()
            next(PreparedStream(split, seed=1, limit=position + BATCH).dataset(position, BATCH).as_numpy_iterator())
            by_graph = time.perf_counter()
        seconds = {"manifest_s": known - begun, "numpy_s": by_numpy - known, "tf_data_s": by_graph - by_numpy}
        rows.append({"what": "place", "files": files, **{name: round(value, 4) for name, value in seconds.items()}})
    return rows


def _write(folder, files, position):
    """The manifest of so many files, each of a unit of its own, and the files that a batch needs."""
    packing = Packing(kind="concatenate", sequence_length=512, overlap=0, align=1)
    layout = Layout(packing=packing, fields={"tokens": Field(512, 0, np.uint16)}, windows_per_file=4096)
    counts = {"windows": files * 4096, "documents": 0, "tokens": 0, "bytes": 0, "words": None}
    train = {**counts, "files": [*[1] * files, 0]}
    about = {**ABOUT, **layout.as_mapping(), "format": FORMAT, "splits": {"train": train}}
    Path(folder, MANIFEST).write_text(json.dumps(about))
    split = Prepared(folder).splits["train"]
    Path(split.directory).mkdir()
    epoch, number = np.divmod(np.arange(position, position + BATCH), split.windows)
    for file in np.unique(split.order(epoch, number, 1) // 4096):
        Path(split.path(int(file))).write_bytes(bytes(4096 * layout.record.itemsize))


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    device.program(main)
