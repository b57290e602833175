"""What captured steps cost: the trace beside the model's own FLOPs and the devices' peak."""

import time
from collections.abc import Callable

import keras
import tensorflow as tf

from flash_tf.config import Config
from flash_tf.profiling import latency, trace
from flash_tf.profiling.capture import Capture
from flash_tf.profiling.latency import Work
from flash_tf.training import modelling
from flash_tf.training.progress import Progress, peak_flops
from flash_tf.training.strategy import device_name

PRODUCT = {"CPU": 1024, "GPU": 8192}  # rows and columns of the matrices whose product measures a peak


def finish(
    config: Config, model: keras.Model, strategy: tf.distribute.Strategy, capture: Capture, progress: Progress
) -> None:
    """Ends the capture of a window of a run, writes its `latency.json` and shows a line."""
    result = report(capture, training_work(config, model, strategy))
    first, last = (result["steps"][i]["step"] for i in (0, -1))
    progress.line(f"profile of steps {first:,} to {last:,}: {latency.headline(result)}; in {capture.folder}")


def training_work(config: Config, model: keras.Model, strategy: tf.distribute.Strategy) -> Work:
    """What a training step does."""
    flops, tokens = modelling.training_flops_per_step(config, model), config.train.tokens_per_step
    return work(config, "train", flops=flops, tokens=tokens, replicas=strategy.num_replicas_in_sync)


def work(config: Config, mode: str, *, flops: int, tokens: int, replicas: int, rows: int | None = None) -> Work:
    """What a step does, on the devices that are there."""
    device, precision = device_name(), config.train.precision
    peak, peak_of = peak_flops(device, precision, replicas), f"{device}'s datasheet, {precision}"
    if peak is None and device != "TPU":
        peak, size = measured_peak(model_dtype(precision), replicas)
        peak_of = f"measured on a {model_dtype(precision)} product of {size:,} x {size:,} matrices"
    return Work(
        mode=mode,
        model=f"{config.model['type']}, mixer {config.model['mixer']['type']}",
        tokens=tokens,
        flops=flops,
        replicas=replicas,
        device=device,
        peak=peak,
        peak_of=peak_of,
        rows=rows,
    )


def model_dtype(precision: str) -> str:
    """What a model of this precision multiplies in."""
    return "bfloat16" if precision == "mixed_bfloat16" else "float32"


def measured_peak(dtype: str, replicas: int) -> tuple[float, int]:
    """FLOP/s of the best of a few large products, on all replicas, of which CPUs share their cores; and the size."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    size = PRODUCT[kind]
    with tf.device(f"{kind}:0"):
        a = tf.cast(tf.random.stateless_normal((size, size), seed=(0, 0)), dtype)
        times = []
        for _ in range(6):  # the first makes ready
            start = time.perf_counter()
            tf.linalg.matmul(a, a)[0, 0].numpy()
            times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times[1:]) * (replicas if kind == "GPU" else 1), size


def report(capture: Capture, done: Work, program_bytes: Callable[[], int | None] = lambda: None) -> dict:
    """Ends a capture and writes its `latency.json`; returns what is in it.

    Args:
      capture: With its steps in it.
      done: What a step did.
      program_bytes: Asked where neither devices nor the trace say how much memory a step takes.

    Raises:
      ValueError: When the trace is empty.
    """
    found = trace.read(trace.load(capture.stop()), capture.name)
    held = None if capture.peaks or found.program_bytes else program_bytes()
    result = latency.summarize(found, done, capture.peaks, held)
    latency.write(result, capture.folder)
    return result
