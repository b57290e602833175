"""On a GPU a prompt is read by programs that XLA compiles layer by layer."""

import collections

import pytest
import tensorflow as tf

from flash_tf.generation import generator
from tests import tiers
from tests.test_traced_once import CAUSAL, B, N, by_layer, compiled_alone, equal, made, options_of, program, token_ids


@pytest.mark.parametrize(("cls", "options"), tiers.of_kinds(CAUSAL, "flash"))
def test_xla_reads_a_prompt_layer_by_layer_as_a_program_without_xla(cls, options):
    model = made(mixer=options_of(cls, options))
    if model.obstacle is not None:
        pytest.skip(model.obstacle)
    valid = tf.constant([N, 9])

    def read(ids):
        return model.extend(ids, model.initial_state(B, N + 5 if model.grows else None), valid, last=True)

    called = by_layer(read, token_ids())
    calls = collections.Counter(compiled_alone(called))
    # One is of the embedding, one of the head, one of the blocks, and one may be of what all blocks share.
    assert max(calls.values()) >= 3 and len(calls) <= 4
    assert equal(called, program(read, token_ids()), token_ids())


@pytest.mark.parametrize("kind", ["flash", "gau"])  # a state of one size, and a cache that grows
def test_a_prompt_is_read_without_kernels_of_tensorflow(kind, monkeypatch):
    monkeypatch.setattr(generator, "takes_xla", lambda: True)
    model = made(mixer={"type": kind, "key_dim": 4})
    next(model.stream([[5, 3]], 2))
    read = next(found for key, found in model.generator._programs._programs.items() if key[0] == "read")
    results = [x.op.name for x in tf.nest.flatten(read.structured_outputs)]
    nodes = tf.compat.v1.graph_util.extract_sub_graph(read.graph.as_graph_def(), results).node
    calls, plain = {"PartitionedCall", "StatefulPartitionedCall"}, {"Const", "Identity", "NoOp", "Placeholder"}
    assert {node.op for node in nodes} <= {*calls, *plain, "ReadVariableOp", "Squeeze"}
