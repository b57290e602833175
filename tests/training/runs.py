"""Tiny experiments: a made-up corpus, a config for it, and ways to train it, in this process or a child."""

import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
from pathlib import Path

import tensorflow as tf
import yaml

from flash_tf import cli, config
from flash_tf.data.prepared_input import PreparedStream
from flash_tf.training import loop
from flash_tf.training.progress import Progress
from flash_tf.training.run import open_stream
from flash_tf.training.strategy import make_strategy
from flash_tf.training.tensorflow_run import make_trainer, open_run

VOCABULARY, LENGTH = 100, 32
MIXER = {"type": "flash", "chunk_size": 8, "key_dim": 8}
SMALLEST = {"depth": 1, "mixer": {"type": "linear_attention", "heads": 2}}  # where no model matters: it is traced soon

# A child of the fork server already has TensorFlow's modules, but TensorFlow has not started in it. It takes a second
# instead of ten, and can still choose its devices.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["flash_tf.training.loop"])


def corpus(folder, seed=0):
    """Writes `train.txt` and `validation.txt`, a document on each line: short words, common and rare ones."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghiklmnop", k=draw.randint(2, 6))) for _ in range(120)]
    for split, documents in (("train", 80), ("validation", 7)):
        lines = [" ".join(draw.choices(words, range(120, 0, -1), k=draw.randint(5, 60))) for _ in range(documents)]
        Path(folder, f"{split}.txt").write_text("\n".join(lines) + "\n")


def write(folder, **sections):
    """Writes `config.yaml`, a tiny FLASH over the folder's corpus; `sections` add to its sections. Returns its path."""
    files = {split: str(Path(folder, f"{split}.txt")) for split in ("train", "validation")}
    values = {
        "model": {"type": "masked_lm", "vocabulary_size": VOCABULARY, "width": 16, "depth": 2, "mixer": MIXER},
        "data": {"source": {"type": "text_files", **files, "documents": "line"}, "sequence_length": LENGTH},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
        "train": {
            "steps": 8,
            "tokens_per_step": 4 * LENGTH,
            "steps_per_loop": 1,
            "precision": "float32",
            "jit_compile": False,  # models this small would take longer to compile than to train
            "checkpoint_every": 2,
        },
        "evaluation": {"every": 4},
    }
    for name, options in sections.items():
        values[name] = {**values.get(name, {}), **options}
    path = Path(folder, "config.yaml")
    path.write_text(yaml.safe_dump(values))
    return str(path)


class Lines(Progress):
    """Records the output. Calls `at` with the number of training loops shown so far."""

    def __init__(self, at=lambda loops: None):
        super().__init__(io.StringIO())
        self._at, self._loops = at, 0

    def status(self, *parts, keep=False):
        super().status(*parts, keep=keep)
        if parts[-1].startswith("|g|"):
            self._loops += 1
            self._at(self._loops)

    def shown(self):
        return self._stream.getvalue()


def train(path, model_dir, *overrides, stop_after=None, **options):
    """Trains in this process; SIGTERM comes after `stop_after` loops. Returns the output."""

    def stop(loops):
        if loops == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    progress = Lines(stop)
    with contextlib.suppress(loop.actions.Interrupted):
        loop.train(config.load(path, overrides), str(model_dir), progress, **options)
    return progress.shown()


def opened(path, model_dir, *overrides):
    """A run and its trainer, before the first step."""
    experiment = config.load(path, overrides)
    run = open_run(experiment, str(model_dir), make_strategy(experiment.strategy, print), Lines())
    with run.begun():
        return run, make_trainer(run, open_stream(run, PreparedStream))


def in_child(function, *args, devices=1, **kwargs):
    """The result of `function` in a child process with `devices` logical CPUs; its error as a RuntimeError."""
    return finish(start(function, *args, devices=devices, **kwargs))


def start(function, *args, devices=1, **kwargs):
    """Starts `function` in a child; see `finish`."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_answer, args=(theirs, devices, function, args, kwargs))
    process.start()
    theirs.close()
    return process, ours


def finish(started):
    """The result of a started child; None if it was killed."""
    process, answer = started
    try:
        done, result = answer.recv()
    except EOFError:
        done, result = True, None
    process.join()
    if not done:
        raise RuntimeError(result)
    return result


def _answer(answer, devices, function, args, kwargs):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    try:
        answer.send((True, function(*args, **kwargs)))
    except Exception as error:
        answer.send((False, f"{type(error).__name__}: {error}"))
    answer.close()
    os._exit(0)  # nothing waits for threads of TensorFlow


def command(folder, *arguments, file_size=None):
    """Runs `flash-tf` in a child that may write at most `file_size` bytes to a file. Returns status and outputs."""
    process = start_command(folder, *arguments, file_size=file_size)
    process.join()
    return process.exitcode, Path(folder, "stdout").read_text(), Path(folder, "stderr").read_text()


def start_command(folder, *arguments, file_size=None):
    """Starts `flash-tf` in a child; see `command`."""
    process = CONTEXT.Process(target=_command, args=(str(folder), list(map(str, arguments)), file_size))
    process.start()
    return process


def _command(folder, arguments, file_size):
    for number, name in ((1, "stdout"), (2, "stderr")):
        with open(Path(folder, name), "w") as file:
            os.dup2(file.fileno(), number)
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
    status = 2
    try:
        status = cli.main(arguments)
        sys.stdout.flush()
    finally:
        os._exit(status)


def checkpoints(model_dir):
    """The folders of a run's checkpoints, without those that were set aside."""
    return sorted(Path(model_dir, "checkpoints").glob("step-????????"))


def state(model_dir, step=None):
    """The content of the newest checkpoint, or the one of `step`: name -> array."""
    folder = checkpoints(model_dir)[-1] if step is None else Path(model_dir, f"checkpoints/step-{step:08d}")
    reader = tf.train.load_checkpoint(str(folder / "variables"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if "ATTRIBUTES" in name}


def bits(arrays):
    """A value for comparing arrays to the bit."""
    return {name: (x.shape, x.dtype.str, x.tobytes()) for name, x in arrays.items()}


def contents(folder):
    """Path -> content of everything below a folder, except what `command` prints into it."""
    files = (path for path in Path(folder).rglob("*") if path.is_file() and path.name not in ("stdout", "stderr"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def records(model_dir, name="metrics.jsonl"):
    return [json.loads(line) for line in Path(model_dir, name).read_text().splitlines()]


def losses(model_dir):
    """Step, loss and gradient norm of every step; each step occurs once."""
    found = [(record["step"], record["loss"], record["gradient_norm"]) for record in records(model_dir)]
    assert [step for step, *_ in found] == list(range(1, len(found) + 1))
    return found


def same(one, other):
    """Holds two finished runs to the same records, evaluations and checkpoints, to the bit."""
    assert losses(one) == losses(other)
    assert records(one, "evaluations.jsonl") == records(other, "evaluations.jsonl")
    assert [path.name for path in checkpoints(one)] == [path.name for path in checkpoints(other)]
    assert bits(state(one)) == bits(state(other))
