"""Mixers that read the whole text: what they are where they leave nothing out, and against wrong input."""

import numpy as np
import pytest
from keras import ops

from flash_tf.layers import (
    BigBird,
    Informer,
    KernelizedAttention,
    Linformer,
    Nystromformer,
    Reformer,
    Skyformer,
    TransformerLS,
)
from kernels_xla import bigbird, informer, kernelized_attention, nystromformer, reformer, skyformer
from kernels_xla.common.landmarks import pseudo_inverse, segments
from kernels_xla.softmax_attention import softmax_attention
from tests.backends import call, to_numpy
from tests.contracts.test_mixers import B, D, N, built, normal, outputs
from tests.numerics import FLOAT32, inputs, relative_error
from tests.oracles import CASES

WHOLE = (Nystromformer, Skyformer, Linformer, Informer, Reformer, BigBird, TransformerLS, KernelizedAttention)


@pytest.mark.parametrize(("spec", "case"), [
    (informer.SPEC, {"queries": N, "seed": 0}),
    (bigbird.SPEC, {"chunk_size": 13, "random_blocks": 1, "seed": 0}),  # three blocks: neighbours or ends
])  # fmt: skip
def test_what_leaves_nothing_out_is_softmax_attention(spec, case):
    arrays = inputs(spec)
    assert relative_error(call(spec.fast, case, arrays), call(softmax_attention, {}, arrays)) < FLOAT32


def test_kernelized_attention_through_all_queries_and_keys_comes_near_it():
    arrays = inputs(kernelized_attention.SPEC, n=5)
    want = call(kernelized_attention.SPEC.fast, {}, arrays)
    found = [relative_error(call(skyformer.SPEC.fast, {"landmarks": t, "seed": 0}, arrays), want) for t in (2, 8, 64)]
    assert found[2] < found[1] < found[0] and found[2] < 0.1


@pytest.mark.parametrize(
    "spec",
    [kernelized_attention.SPEC, nystromformer.SPEC, skyformer.SPEC, informer.SPEC, reformer.SPEC],
    ids=lambda s: s.name,
)
def test_a_text_with_holes_is_the_text_of_its_real_tokens(spec):
    arrays, there = inputs(spec, b=1), np.random.default_rng(0).random(N) < 0.7
    got = call(spec.fast, CASES[spec.name][0], arrays, {"padding_mask": there[None]})
    alone = call(spec.fast, CASES[spec.name][0], {name: x[:, there] for name, x in arrays.items()})
    assert relative_error(got[:, there], alone) < FLOAT32


@pytest.mark.parametrize(("n", "count"), [(37, 8), (37, 37), (5, 8), (1, 8)])
def test_segments_cover_the_text_in_order_and_differ_by_one_token(n, count):
    member = to_numpy(segments(ops.zeros((1, n, 1)), None, count))[0]
    assert (member.sum(axis=1) == 1).all() and (np.diff(member.argmax(axis=1)) >= 0).all()
    assert np.ptp(member.sum(axis=0)) <= 1


def test_the_inverse_of_a_matrix_near_the_identity_is_its_inverse():
    matrix = np.eye(6) + 0.1 * np.random.default_rng(0).normal(size=(2, 6, 6))
    found = to_numpy(pseudo_inverse(ops.convert_to_tensor(matrix, "float32")))
    assert relative_error(found, np.linalg.inv(matrix)) < FLOAT32


def test_a_text_does_not_depend_on_those_beside_it():
    x = normal(B, N, D)
    for cls in WHOLE:
        layer = built(cls, {"heads": 2})
        alone = outputs(layer, x[:1])
        assert relative_error(outputs(layer, np.concatenate([x[:1], 100 * x[1:]]))[:1], alone) < FLOAT32, cls


@pytest.mark.parametrize("cls", [cls for cls in WHOLE if cls.never_causal])
def test_a_causal_form_that_there_is_not_is_refused_in_one_line(cls):
    with pytest.raises(ValueError) as error:
        cls(causal=True)
    assert str(error.value) == f"{cls.__name__} reads the whole text: it needs causal false, got True"


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Nystromformer(landmarks=0), "Nystromformer needs landmarks >= 1, got 0"),
    (lambda: Skyformer(seed=-1), "Skyformer needs seed >= 0, got -1"),
    (lambda: Informer(heads=0), "Informer needs heads >= 1, got 0"),
    (lambda: Reformer(buckets=5), "Reformer needs an even number of buckets, got 5"),
    (lambda: TransformerLS(chunk_size=7), "TransformerLS needs an even chunk_size, got 7"),
    (lambda: BigBird(random_blocks=0), "BigBird needs random_blocks >= 1, got 0"),
    (lambda: Linformer(heads=3).build((None, None, D)),
     "Linformer: heads must divide the width, got heads 3, width 32"),
])  # fmt: skip
def test_a_wrong_option_is_refused_in_one_line(make, said):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == said


def test_a_text_beyond_the_constant_of_linformer_is_refused():
    layer = built(Linformer, {"heads": 2, "max_length": N})
    assert outputs(layer, normal(B, N, D)).shape == (B, N, D)
    with pytest.raises(ValueError, match=f"Linformer needs texts of at most max_length={N} tokens, got {N + 1}"):
        outputs(layer, normal(B, N + 1, D))
