"""Sums that kernels share: over more chunks than one product takes, and of bfloat16."""

import numpy as np
import pytest
from keras import ops

from kernels_xla.common import accumulate, chunking
from kernels_xla.common.chunking import GROUP, sum_of_earlier, sum_of_later
from kernels_xla.common.sharding import by_device, divided
from tests import tiers
from tests.backends import to_numpy
from tests.numerics import FLOAT32, relative_error

CHUNKS = 2 * GROUP + 9


@pytest.fixture(scope="module")
def documents():
    """The first and the last document of each chunk: documents of 1 to 200 chunks, that begin amid one."""
    rng = np.random.default_rng(0)
    rows = [np.repeat(np.arange(1, CHUNKS + 1), rng.integers(1, 400, CHUNKS))[: 2 * CHUNKS] for _ in range(2)]
    return np.stack([row[0::2] for row in rows]), np.stack([row[1::2] for row in rows])


def test_a_chunk_reads_the_earlier_and_the_later_ones_of_its_own_document_across_groups(documents):
    first, last = (ops.convert_to_tensor(x, "int32") for x in documents)
    x = np.random.default_rng(1).normal(size=[2, CHUNKS, 3]).astype("float32")
    at, (first_of, last_of) = np.arange(CHUNKS), documents
    earlier = (at < at[:, None]) & (last_of[:, None] == first_of[..., None])
    later = (at > at[:, None]) & (first_of[:, None] == last_of[..., None])
    for function, seen in ((sum_of_earlier, earlier), (sum_of_later, later)):
        got = to_numpy(function(ops.convert_to_tensor(x), first, last))
        assert relative_error(got, np.einsum("bij,bjf->bif", seen, x)) < FLOAT32


def test_a_chunk_of_one_document_reads_all_earlier_ones_across_groups():
    x = np.random.default_rng(1).normal(size=[2, CHUNKS, 3]).astype("float32")
    got = to_numpy(sum_of_earlier(ops.convert_to_tensor(x)))
    assert relative_error(got, np.cumsum(x, axis=1) - x) < FLOAT32


@pytest.mark.skipif(tiers.ON_JAX, reason="JAX knows every length")
def test_an_unknown_number_of_chunks_costs_no_more_than_a_known_one(monkeypatch):
    import tensorflow as tf

    sizes, product = [], chunking._triangular
    monkeypatch.setattr(chunking, "GROUP", 4)
    monkeypatch.setattr(
        chunking, "_triangular", lambda x, *given: (sizes.append(ops.shape(x)[-2]), product(x, *given))[1]
    )
    traced = tf.function(lambda x: (sum_of_earlier(x), [*sizes])).get_concrete_function(tf.TensorSpec((2, None, 3)))
    for chunks, groups in ((0, 0), (1, 1), (3, 1), (11, 3)):
        x = np.random.default_rng(1).normal(size=[2, chunks, 3]).astype("float32")
        got, found = traced(tf.constant(x))
        assert np.allclose(got, np.cumsum(x, axis=1) - x, atol=1e-5)
        assert sorted(int(size) for size in found) == sorted((groups, min(max(chunks, 1), 4)))


@pytest.mark.parametrize(("devices", "chunks"), [(3, 6), (8, 8), (2, 2 * 257), (2, 4 * GROUP), (4, 7)])
def test_devices_that_divide_the_chunks_change_no_sum(devices, chunks):
    x = np.random.default_rng(1).normal(size=[2, chunks, 3]).astype("float32")
    documents = ops.convert_to_tensor(np.repeat(np.arange(1, chunks + 1), 2)[None, :chunks], "int32")
    with divided(tokens=devices):
        got = to_numpy(sum_of_earlier(ops.convert_to_tensor(x)))
        packed = to_numpy(sum_of_earlier(ops.convert_to_tensor(x), documents, documents))
    assert relative_error(got, np.cumsum(x, axis=1) - x) < FLOAT32
    want = np.where(np.arange(chunks)[:, None] % 2, np.roll(x, 1, axis=1), 0)  # documents of two chunks
    assert relative_error(packed, want) < FLOAT32


def test_tokens_of_a_device_follow_one_another():
    x = ops.reshape(ops.arange(24), (4, 6))
    with divided(rows=2, tokens=3):
        flat, devices = by_device(x)
        assert by_device(x[:, :5])[1] == 1
    assert devices == 6
    assert to_numpy(flat)[:8].tolist() == [0, 1, 6, 7, 2, 3, 8, 9]  # of rows 0 and 1, then of the next device
    assert to_numpy(by_device(x)[0]).tolist() == list(range(24))


def test_a_sum_of_bfloat16_is_not_rounded_to_it():
    ones = ops.ones([1001], "bfloat16")
    got = accumulate.einsum("i,i->", ones, ones)
    assert got.dtype == "float32" and float(got) == 1001  # 1,000 in bfloat16
