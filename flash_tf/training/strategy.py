"""The devices that share the work. Everything else is the same for every strategy."""

import platform

import tensorflow as tf

from flash_tf.config import StrategyConfig


def make_strategy(config: StrategyConfig) -> tf.distribute.Strategy:
    """The `tf.distribute` strategy of a config.

    Raises:
      ValueError: The devices are not there.
    """
    return {"one_device": _one_device, "mirrored": _mirrored, "multi_worker": _multi_worker, "tpu": _tpu}[config.type](
        config
    )


def _one_device(config):
    device = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    return tf.distribute.OneDeviceStrategy(device)


def _mirrored(config):
    devices = config.devices
    if devices is None and not tf.config.list_logical_devices("GPU"):
        devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    try:
        strategy = tf.distribute.MirroredStrategy(devices)
        # One device needs no sum over replicas, so its whole loop can be one program.
        alone = strategy.num_replicas_in_sync == 1
        return tf.distribute.OneDeviceStrategy(strategy.extended.worker_devices[0]) if alone else strategy
    except (ValueError, RuntimeError) as error:
        there = ", ".join(device.name for device in tf.config.list_logical_devices())
        raise ValueError(f"strategy.devices {devices} cannot be mirrored; the devices here are: {there}") from error


def _multi_worker(config):
    if config.workers is None:
        if not tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec():
            raise ValueError("strategy.type multi_worker needs strategy.workers or the variable TF_CONFIG, got neither")
        return tf.distribute.MultiWorkerMirroredStrategy()
    if not 0 <= config.index < len(config.workers):
        raise ValueError(f"strategy.index must be from 0 to {len(config.workers) - 1}, got {config.index}")
    cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": config.workers}), task_type="worker", task_id=config.index, rpc_layer="grpc"
    )
    return tf.distribute.MultiWorkerMirroredStrategy(cluster)


def _tpu(config):
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=config.tpu)
        if config.tpu != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, tf.errors.OpError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ValueError(f"strategy.tpu {config.tpu!r}: no TPU answers here ({reason})") from error
    strategy = tf.distribute.TPUStrategy(resolver)
    if strategy.extended.num_hosts > 1:  # this process makes the windows, and other hosts cannot call it
        raise ValueError(f"strategy.tpu needs a TPU with one host, {config.tpu!r} has {strategy.extended.num_hosts}")
    return strategy


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes the checkpoints and metrics."""
    return getattr(strategy.extended, "_is_chief", True)  # only multi-worker strategies have it, and it is private


def device_name() -> str:
    """The driver's name for the devices that do the work."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        return tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
    return "TPU" if tf.config.list_logical_devices("TPU") else f"CPU ({platform.machine()})"
