"""The processes of one run on JAX."""

import contextlib
from collections.abc import Callable, Iterator

import jax

from flash_tf.config import StrategyConfig
from flash_tf.training import workers

REGISTRATION = 120  # seconds, once all have come; some machines take many to find their devices


@contextlib.contextmanager
def together(config: StrategyConfig, report: Callable[[str], None]) -> Iterator[None]:
    """Joins the run's processes into one set of devices. A process that is lost is named, and ends the others.

    Args:
      config: The section. Without `workers`, this process is alone.
      report: Called with a line about workers that are missing.

    Raises:
      OSError: A worker did not come; see `workers.join`.
      ValueError: `workers` is "auto", and there is no cluster.
    """
    if config.workers is None:
        yield
        return
    if config.workers == "auto":
        _initialize({"initialization_timeout": config.join_timeout})
        with contextlib.nullcontext():
            yield
    else:
        peers = workers.join(config.workers, config.index, config.join_timeout, report)
        peers.watch()
        count, timeout = len(config.workers), {"initialization_timeout": REGISTRATION}
        with peers.together():
            _initialize({"num_processes": count, "process_id": config.index, **timeout}, config.workers[0])
            yield
    jax.distributed.shutdown()  # which waits for the others


def _initialize(options, address=None):
    try:
        jax.distributed.initialize(address, **options)
    except ValueError as error:
        raise ValueError(f"strategy.workers auto needs a TPU pod or a cluster: {error}") from error
