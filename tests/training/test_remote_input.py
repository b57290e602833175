"""Prepared text as the input of processes that run none of our Python: TensorFlow's servers on this machine."""

import contextlib
import json

import numpy as np
import pytest
import tensorflow as tf

from flash_tf.data.prepared import Prepared
from flash_tf.data.prepared_input import PreparedBatches, PreparedStream
from tests.data.made_prepared import packing_of, prepare
from tests.training import runs
from tests.training.test_strategies import free_ports

pytestmark = pytest.mark.full

POSITION, SIZE, STEPS, SEED = 24, 8, 6, 5


def serve(cluster, job, task):
    """A server of TensorFlow's own, until it is killed."""
    tf.distribute.Server(json.loads(cluster), job_name=job, task_index=task, protocol="grpc").join()


@contextlib.contextmanager
def servers(cluster):
    """The processes of a cluster but its chief."""
    jobs = [(job, task) for job, tasks in cluster.items() if job != "chief" for task in range(len(tasks))]
    started = [runs.start(serve, json.dumps(cluster), job, task)[0] for job, task in jobs]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


def stream(directory):
    return PreparedStream(Prepared(directory).splits["train"], seed=SEED, limit=POSITION + STEPS * SIZE)


def listed(batch):
    return {name: x.numpy().tolist() for name, x in batch.items()}


def by_device(cluster, directory):
    """The batches of both workers' shares, each read on its own worker, and of an evaluation."""
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(json.loads(cluster)))
    found = []
    for worker in range(2):
        with tf.device(f"/job:worker/replica:0/task:{worker}/device:CPU:0"):
            train = iter(stream(directory).dataset(POSITION, SIZE, 2, worker))
            batches = [next(train) for _ in range(STEPS)]
            validation = iter(
                PreparedBatches(Prepared(directory).splits["validation"], batch_size=SIZE).dataset(2, worker)
            )
            batches.append(next(validation))
        assert all(f"job:worker/replica:0/task:{worker}" in x.backing_device for one in batches for x in one.values())
        found.append([listed(one) for one in batches])
    return found


def by_coordinator(cluster, directory):
    """What both workers read, each from its dataset of `create_per_worker_dataset`."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(json.loads(cluster)), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    dataset = coordinator.create_per_worker_dataset(lambda: stream(directory).dataset(POSITION, SIZE))
    iterator = iter(dataset)
    step = tf.function(lambda iterator: next(iterator))
    found = [coordinator.schedule(step, args=(iterator,)) for _ in range(STEPS)]
    coordinator.join()
    return [one.fetch() for one in found]


@pytest.fixture
def made(tmp_path):
    return prepare(tmp_path, packing_of("documents", 1))


def test_remote_servers_read_the_batches_of_one_process(made):
    cluster = {"worker": [f"localhost:{port}" for port in free_ports()]}
    with servers(cluster):
        shares = runs.in_child(by_device, json.dumps(cluster), made.directory)
    split, half = made.splits["train"], SIZE // 2
    for step in range(STEPS):
        want = split.batch(POSITION + step * SIZE, SIZE, SEED)
        for worker in range(2):
            mine = slice(worker * half, (worker + 1) * half)
            assert shares[worker][step] == {name: x[mine].tolist() for name, x in want.items()}
    for worker in range(2):
        want = made.splits["validation"].read(np.arange(worker * half, (worker + 1) * half))
        assert shares[worker][STEPS]["tokens"] == want["tokens"].tolist()


def test_workers_of_a_parameter_server_strategy_read_the_batches_of_one_process(made):
    ports = free_ports(4)
    chief, server, *both = (f"localhost:{port}" for port in ports)
    cluster = {"chief": [chief], "ps": [server], "worker": both}
    with servers(cluster):
        found = runs.in_child(by_coordinator, json.dumps(cluster), made.directory)
    want = [made.splits["train"].batch(POSITION + step * SIZE, SIZE, SEED)["tokens"].tolist() for step in range(STEPS)]
    assert len(found) == STEPS and all(one["tokens"].tolist() in want for one in found)
    assert found[0]["tokens"].tolist() == want[0]
