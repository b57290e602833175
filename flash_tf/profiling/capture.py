"""One session of TensorFlow's profiler, with each step marked, and the memory that devices say they took."""

import contextlib
import os
from collections.abc import Iterator

import tensorflow as tf


class Capture:
    """Captures steps; TensorBoard's profile tab opens the folder.

    A process has one session at a time.

    Args:
      folder: Where the trace goes, under `plugins/profile/<time>/`; local or gs://.
      name: What the steps are marked as.

    Attributes:
      peaks: Step -> the most bytes that any accelerator held in it; empty where none says so.
    """

    def __init__(self, folder: str, name: str):
        self.folder, self.name, self.peaks = folder, name, {}
        self._before = set(self._files())
        tf.io.gfile.makedirs(folder)
        try:
            tf.profiler.experimental.start(folder)  # the default levels: operations and devices, but no Python calls
        except tf.errors.AlreadyExistsError as error:
            raise ValueError("this process is being profiled already, and can be only once at a time") from error

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Marks a step, from 1: TensorBoard drops step 0. It must wait for its devices before it ends."""
        devices = _accelerators()
        for device in devices:
            tf.config.experimental.reset_memory_stats(device)
        with tf.profiler.experimental.Trace(self.name, step_num=number, _r=1):
            yield
        if devices:
            self.peaks[number] = max(tf.config.experimental.get_memory_info(device)["peak"] for device in devices)

    def stop(self) -> list[str]:
        """Ends the session; returns the files that it wrote, one a host."""
        tf.profiler.experimental.stop()
        return sorted(set(self._files()) - self._before)

    def discard(self) -> None:
        """Ends the session without a file."""
        tf.profiler.experimental.stop(save=False)

    def _files(self):
        return tf.io.gfile.glob(os.path.join(self.folder, "plugins", "profile", "*", "*.xplane.pb"))


def _accelerators():
    """The devices that say how much memory they take, as `GPU:0`."""
    found = []
    for device in (*tf.config.list_logical_devices("GPU"), *tf.config.list_logical_devices("TPU")):
        name = ":".join(device.name.split(":")[-2:])
        with contextlib.suppress(ValueError, tf.errors.OpError):  # its allocator keeps no count
            tf.config.experimental.get_memory_info(name)
            found.append(name)
    return found
