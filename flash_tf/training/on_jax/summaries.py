"""Curves for TensorBoard, in the folders and under the names of a run of TensorFlow."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from tensorboardX import SummaryWriter

from flash_tf import owned_files

Write = Callable[[str, int, Mapping[str, float]], None]  # takes a subfolder, a step and the values of that step


@contextlib.contextmanager
def summaries(model_dir: str, chief: bool) -> Iterator[Write]:
    """A function that adds points to the curves of a run. They go to a disk alone, and not to a bucket.

    Args:
      model_dir: The model directory.
      chief: Whether this process writes the run's files.
    """
    if not chief or not owned_files.is_local(model_dir):
        yield lambda folder, step, values: None
        return
    with contextlib.ExitStack() as stack:
        writers = {}

        def write(folder, step, values):
            if folder not in writers:
                writers[folder] = stack.enter_context(SummaryWriter(f"{model_dir}/summaries/{folder}"))
            for name, value in values.items():
                writers[folder].add_scalar(name, value, step)

        yield write
