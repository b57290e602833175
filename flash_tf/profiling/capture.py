"""One session of TensorFlow's profiler, with a mark on each step, and the devices' peak memory."""

import contextlib
import os
from collections.abc import Iterator

import tensorflow as tf


class Capture:
    """Captures steps. TensorBoard's profile tab opens the folder. A process has one session at a time.

    Args:
      folder: The folder of the trace, which is written to `plugins/profile/<time>/` in it; local or gs://.
      name: The name of the marks on the steps.

    Attributes:
      peaks: Step -> the most bytes that any accelerator held in it; empty if no accelerator reports its memory.
    """

    def __init__(self, folder: str, name: str):
        self.folder, self.name, self.peaks = folder, name, {}
        self._before = set(self._files())
        tf.io.gfile.makedirs(folder)
        try:
            tf.profiler.experimental.start(folder)  # the default levels: operations and devices, but no Python calls
        except tf.errors.AlreadyExistsError as error:
            raise ValueError("another profile of this process is running: a process can have one at a time") from error

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Marks a step, from 1: TensorBoard drops step 0. The body must wait for its devices before it ends."""
        devices = _accelerators()
        for device in devices:
            tf.config.experimental.reset_memory_stats(device)
        with tf.profiler.experimental.Trace(self.name, step_num=number, _r=1):
            yield
        if devices:
            self.peaks[number] = max(tf.config.experimental.get_memory_info(device)["peak"] for device in devices)

    def stop(self) -> list[str]:
        """Ends the session. Returns its files, one for each host."""
        tf.profiler.experimental.stop()
        return sorted(set(self._files()) - self._before)

    def discard(self) -> None:
        """Ends the session without a file."""
        tf.profiler.experimental.stop(save=False)

    def _files(self):
        # Not by a glob: the folder may have brackets in its name, as one of a sweep over lists has.
        below = tf.io.gfile.walk(os.path.join(self.folder, "plugins", "profile"))
        return [
            os.path.join(folder, name) for folder, _, names in below for name in names if name.endswith(".xplane.pb")
        ]


def _accelerators():
    """The devices that report their memory, for example `GPU:0`."""
    found = []
    for device in (*tf.config.list_logical_devices("GPU"), *tf.config.list_logical_devices("TPU")):
        name = ":".join(device.name.split(":")[-2:])
        with contextlib.suppress(ValueError, tf.errors.OpError):  # its allocator does not count
            tf.config.experimental.get_memory_info(name)
            found.append(name)
    return found
