from itertools import product

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from flash_tf.data.prepared_input import PreparedBatches, PreparedStream
from flash_tf.data.stream import EvaluationBatches, WindowStream
from tests import tiers
from tests.data.made_prepared import a_cache, packing_of, prepare

KINDS = ("concatenate", "documents")
PYTHON = {"PyFunc", "EagerPyFunc", "PyFuncStateless", "GeneratorDataset"}


def operators(dataset: tf.data.Dataset) -> set[str]:
    """The operators of a dataset's graph, in functions of functions too."""
    graph = graph_pb2.GraphDef()
    graph.ParseFromString(tf.raw_ops.DatasetToGraphV2(input_dataset=dataset._variant_tensor).numpy())
    assert any(function.node_def for function in graph.library.function)
    return {node.op for part in (graph.node, *(f.node_def for f in graph.library.function)) for node in part}


def assert_same(one, other) -> None:
    one, other = list(one), list(other)
    assert len(one) == len(other) > 0
    for ours, theirs in zip(one, other, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype and ours[name].tolist() == theirs[name].tolist(), name


def assert_shared(train, position: int, steps: int, pipelines: int) -> None:
    """The pipelines' parts, put together, are the batches that NumPy reads."""
    size, seed = 12, 7
    stream, parts = PreparedStream(train, seed=seed, limit=position + steps * size), []
    for i in range(pipelines):
        dataset = stream.dataset(position, size, pipelines, i)
        assert all(x.shape[0] == size // pipelines for x in dataset.element_spec.values())
        parts.append(list(dataset.as_numpy_iterator()))
    found = (
        {name: np.concatenate([one[name] for one in batch]) for name in batch[0]} for batch in zip(*parts, strict=True)
    )
    assert_same(found, (train.batch(position + i * size, size, seed) for i in range(steps)))


@pytest.mark.parametrize("way", tiers.thinned(list(product(KINDS, (0, 1), (1, 4))), ("documents", 1, 4)))
def test_pipelines_share_the_batches_that_numpy_reads(tmp_path, way):
    kind, overlap, pipelines = way
    train = prepare(tmp_path, packing_of(kind, overlap)).splits["train"]
    assert_shared(train, train.windows // 12 * 12, 3, pipelines)  # across the end of an epoch


@pytest.mark.full
@pytest.mark.parametrize("pipelines", [1, 2, 6])
def test_pipelines_share_the_batches_of_whole_epochs(tmp_path, pipelines):
    train = prepare(tmp_path, packing_of("documents", 0)).splits["train"]
    for position, steps in ((0, 3 * train.windows // 12), (60, 2), (12 * train.windows, 2)):
        assert_shared(train, position, steps, pipelines)


@pytest.mark.parametrize("documents", tiers.thinned([1, 2], 2))
def test_a_split_of_less_than_a_file_is_read_over_and_over(tmp_path, documents):
    train = prepare(tmp_path, packing_of("concatenate", 1), windows_per_file=64, documents=documents).splits["train"]
    assert train.full == 0
    stream = PreparedStream(train, seed=1, limit=40)
    assert_same(stream.dataset(0, 8).as_numpy_iterator(), (train.batch(8 * i, 8, 1) for i in range(5)))


@pytest.mark.parametrize("way", tiers.thinned(list(product(KINDS, (0, 1))), ("documents", 1)))
def test_an_evaluation_has_each_window_of_the_token_caches_once(tmp_path, way):
    packing = packing_of(*way)
    split = prepare(tmp_path, packing, shards=1).splits["validation"]
    cache = a_cache(tmp_path / "cache", "validation", shards=1)
    for windows, pipelines in ((None, 4), (5, 2)):
        theirs = EvaluationBatches(cache, packing, batch_size=8, windows=windows)
        ours = PreparedBatches(split, batch_size=8, windows=windows)
        assert (len(ours), ours.words) == (len(theirs), theirs.words)
        for i in range(pipelines):
            assert_same(*(batches.dataset(pipelines, i).as_numpy_iterator() for batches in (ours, theirs)))


def test_no_call_of_the_input_goes_back_to_python(tmp_path):
    made = prepare(tmp_path, packing_of("documents", 1))
    ours = PreparedStream(made.splits["train"], seed=0, limit=100).dataset(8, 8, 2, 1)
    assert not operators(ours) & PYTHON
    assert not operators(PreparedBatches(made.splits["validation"], batch_size=8).dataset(2, 1)) & PYTHON
    stream = WindowStream(a_cache(tmp_path / "cache"), packing_of("documents", 1), seed=0, limit=100)
    assert operators(stream.dataset(8, 8, 2, 1)) & PYTHON  # the text that is tokenized meanwhile cannot do without


def test_a_file_that_is_gone_is_named_once_reading_has_failed(tmp_path):
    stream = PreparedStream(prepare(tmp_path, packing_of("concatenate", 1)).splits["train"], seed=0, limit=800)
    assert stream.failure is None
    (tmp_path / "prepared/train/0000001-00000.windows").write_bytes(b"short")
    with pytest.raises(tf.errors.OpError):
        list(stream.dataset(0, 8))
    assert "0000001-00000.windows needs 8 windows of 34 bytes" in str(stream.failure)
