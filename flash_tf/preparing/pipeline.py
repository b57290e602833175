"""Runs tasks as a pipeline of Apache Beam, in processes here or on a cluster."""

import re
from collections.abc import Sequence

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from flash_tf.preparing.work import Task, Work

# The last line of a worker's trace, by which Beam tells of its error.
REASON = re.compile(r"\b(?:ValueError|OSError|\w+Error): ([^\n]+?)(?: \[while running .*|\n|$)")


class _Do(beam.DoFn):
    """Does tasks; what they share is made once in each process."""

    def __init__(self, work: Work):
        self._work = work

    def process(self, task: Task):
        self._work.do(task)
        return ()


def run(work: Work, tasks: Sequence[Task], flags: Sequence[str], processes: int) -> None:
    """Does all tasks.

    Args:
      work: What they share.
      tasks: The tasks.
      flags: Beam's own, as `--runner=DataflowRunner`; none to work in processes here.
      processes: Their number, where there are no flags.

    Raises:
      ValueError: A task failed. The message is its first error's.
    """
    if not tasks:
        return
    runner = None
    if not flags:
        # Beam's DirectRunner would first look for a program on the network.
        runner, workers = FnApiRunner(), min(processes, len(tasks))
        mode = "in_memory" if workers == 1 else "multi_processing"
        flags = [f"--direct_running_mode={mode}", f"--direct_num_workers={workers}"]
    try:
        with beam.Pipeline(runner=runner, options=PipelineOptions(list(flags))) as pipeline:
            # A shuffle, so that the tasks go to all workers.
            pipeline | beam.Create(tasks) | beam.Reshuffle() | "do" >> beam.ParDo(_Do(work))
    except (RuntimeError, ValueError, OSError) as error:
        if reasons := REASON.findall(str(error)):
            raise ValueError(reasons[-1]) from error
        raise


def check(flags: Sequence[str]) -> None:
    """Raises a ValueError for flags that Beam does not know."""
    options = PipelineOptions(list(flags))
    unknown = options.get_all_options(retain_unknown_options=True).keys() - options.get_all_options().keys()
    for flag in flags:
        spelled = flag.partition("=")[0]
        of_one_dash = spelled[:1] == "-" and spelled[1:2].isalpha()  # which Beam passes over
        if of_one_dash or spelled.lstrip("-").replace("-", "_") in unknown:
            raise ValueError(f"Apache Beam has no option {spelled}")
