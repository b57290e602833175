"""The devices that share the work. Everything else is the same for every strategy."""

import itertools
import platform
import re
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context

from flash_tf.config import StrategyConfig
from flash_tf.training import workers

KEYS = 1000  # more than a strategy has groups of devices
_MADE = itertools.count()  # strategies of this process
REGISTRATION = 120  # seconds; some machines take many to find their GPUs


def make_strategy(config: StrategyConfig, report: Callable[[str], None]) -> tf.distribute.Strategy:
    """The `tf.distribute` strategy of a config.

    Args:
      config: The section.
      report: Called with a line about workers that are missing.

    Raises:
      ValueError: The devices are not there.
      OSError: A worker did not come; see `workers.join`.
    """
    check_tensorflow(config)
    made = {"one_device": _one_device, "mirrored": _mirrored, "multi_worker": _multi_worker, "tpu": _tpu}
    return made[config.type](config, report)


def check_tensorflow(config: StrategyConfig) -> None:
    """Raises a ValueError for the strategy of the trainer on JAX."""
    if config.type == "jax":
        raise ValueError("strategy.type jax is for `flash-tf train` alone: set strategy.type=one_device here")


def has_gpu() -> bool:
    """Whether there is a GPU, which all strategies but `tpu` prefer."""
    return bool(tf.config.list_logical_devices("GPU"))


def _one_device(*_):
    return tf.distribute.OneDeviceStrategy("GPU:0" if has_gpu() else "CPU:0")


def check_devices(config: StrategyConfig) -> None:
    """Raises a ValueError unless all devices that `mirrored` names are there. TensorFlow would take others instead."""
    if config.devices is None:  # several workers must find each other before TensorFlow looks for devices
        return
    there = {f"{one.device_type}:{one.name.rpartition(':')[2]}": one for one in tf.config.list_logical_devices()}
    for device in config.devices:
        if device.upper().removeprefix("/").removeprefix("DEVICE:") not in there:
            raise ValueError(f"strategy.devices {device!r} is not there: the devices here are {', '.join(there)}")


def _mirrored(config, _):
    check_devices(config)
    devices = config.devices
    if devices is None and not tf.config.list_logical_devices("GPU"):
        devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    # TensorFlow numbers the groups of each strategy from here on, and keeps the shapes of a group's sums for good.
    tf.distribute.MirroredStrategy._collective_key_base = KEYS * next(_MADE)
    try:
        strategy = tf.distribute.MirroredStrategy(devices)
        # One device needs no sum over replicas, so its whole loop can be one program.
        alone = strategy.num_replicas_in_sync == 1
        return tf.distribute.OneDeviceStrategy(strategy.extended.worker_devices[0]) if alone else strategy
    except (ValueError, RuntimeError) as error:
        there = ", ".join(device.name for device in tf.config.list_logical_devices())
        raise ValueError(f"strategy.devices {devices} cannot be mirrored; the devices here are: {there}") from error


def _multi_worker(config, report):
    if config.workers is None:
        cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if not cluster.cluster_spec():
            raise ValueError("strategy.type multi_worker needs strategy.workers or the variable TF_CONFIG, got neither")
    else:
        cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": config.workers}), task_type="worker", task_id=config.index, rpc_layer="grpc"
        )
    tasks = cluster.cluster_spec().as_dict()
    addresses = [*tasks.get("chief", []), *tasks.get("worker", [])]
    index = cluster.task_id + len(tasks.get("chief", [])) * (cluster.task_type == "worker")
    peers = workers.join(addresses, index, config.join_timeout, report)
    peers.watch()
    _bound_registration(cluster)
    with peers.naming():
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster)
    strategy.peers = peers
    return strategy


def _bound_registration(cluster):
    """Bounds the time in which TensorFlow waits for a worker that is lost when all have just come: else an hour.

    In it no other thread of Python runs. TensorFlow takes the limit only with all else that it would set itself.
    """
    tasks = cluster.cluster_spec().as_dict()
    job_of = context.coordination_config_pb2.CoordinatedJob
    jobs = [job_of(name=job, num_tasks=len(tasks[job])) for job in ("chief", "worker") if job in tasks]
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(cluster.cluster_spec()),
        coordinated_jobs=jobs,
        cluster_register_timeout_in_ms=REGISTRATION * 1000,
    )


def _tpu(config, _):
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=config.tpu)
        if config.tpu != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, tf.errors.OpError, RuntimeError) as error:
        reason = re.sub(r"\. Failed in init.*|: No OpKernel.*", "", str(error).strip().splitlines()[0])
        raise ValueError(f"strategy.tpu {config.tpu!r}: no TPU answers here ({reason})") from error
    return tf.distribute.TPUStrategy(resolver)


def hosts(strategy: tf.distribute.Strategy) -> int:
    """How many hosts of a TPU read input for this process; 1 elsewhere."""
    return getattr(strategy.extended, "num_hosts", 1)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes the checkpoints and metrics."""
    return getattr(strategy.extended, "_is_chief", True)  # only multi-worker strategies have it, and it is private


def device_name() -> str:
    """The driver's name for the devices that do the work."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        return tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
    return "TPU" if tf.config.list_logical_devices("TPU") else f"CPU ({platform.machine()})"
