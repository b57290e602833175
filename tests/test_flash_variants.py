"""FLASH with one of its two sums, with windows that overlap, and with softmax for first tokens."""

import numpy as np
import pytest
from keras import ops

from flash_tf.layers import MixedChunkAttention
from kernels_xla.flash import decode
from kernels_xla.flash.attention import SPEC, mixed_chunk_attention
from kernels_xla.gau import gau_attention
from kernels_xla.softmax_attention import softmax_attention
from tests.backends import tensors, to_numpy
from tests.numerics import FLOAT32, inputs, masks, relative_error

ARRAYS = tensors(inputs(SPEC), "float32")
Q_QUAD, K_QUAD, Q_LIN, K_LIN, V, A, B = (ARRAYS[name] for name in SPEC.inputs)
NO_LINEAR, NO_QUADRATIC = {"lin_q": None, "lin_k": None}, {"quad_q": None, "quad_k": None, "a": None, "b": None}
C, WIDTH = 4, 16
LAYER = {"chunk_size": C, "key_dim": 8, "causal": True}
VARIANTS = [
    {"parts": "local"},
    {"parts": "global", "relative_bias": False},
    {"overlapping": True},
    {"parts": "local", "overlapping": True},
    {"rotary_heads": "local"},
    {"rotary_heads": "none", "use_bias": False},
]


def kernel(**options):
    return to_numpy(mixed_chunk_attention(**{**ARRAYS, "chunk_size": 5, **options}))


def heads(x):
    return x[:, :, None]


@pytest.mark.parametrize("causal", [False, True])
def test_the_two_parts_add_up_to_both(causal):
    masked = tensors(masks("packed"), "float32")
    both = kernel(causal=causal, **masked)
    alone = [kernel(causal=causal, **masked, **without) for without in (NO_LINEAR, NO_QUADRATIC)]
    assert relative_error(sum(alone), both) < FLOAT32


def test_global_attention_of_a_causal_first_chunk_is_zero_and_sees_nothing_of_its_own_chunk():
    out = kernel(causal=True, **NO_QUADRATIC)
    assert not out[:, :5].any() and out[:, 5:].any(axis=-1).all()
    other = {
        name: ops.where(np.arange(V.shape[1])[None, :, None] < 5, x, -x) for name, x in ARRAYS.items() if x.ndim > 2
    }
    changed = kernel(causal=True, **{**other, **NO_QUADRATIC, "lin_q": Q_LIN})
    assert np.array_equal(changed[:, 5:10], out[:, 5:10])


def test_global_attention_that_is_not_causal_has_no_chunks():
    assert relative_error(kernel(**NO_QUADRATIC), kernel(chunk_size=16, **NO_QUADRATIC)) < FLOAT32


@pytest.mark.parametrize("causal", [False, True])
def test_overlapping_windows_give_the_second_chunk_quadratic_attention_of_two_chunks(causal):
    n = 2 * C
    two = {name: x[:, :n] if x.ndim > 2 else x for name, x in ARRAYS.items()}
    got = kernel(**{**two, **NO_LINEAR, "chunk_size": C, "overlapping": True, "causal": causal})
    q, k, v = (heads(two[name]) for name in ("quad_q", "quad_k", "v"))
    want = to_numpy(gau_attention(q, k, v, A, B, causal=causal, divisor=n))[:, :, 0]
    assert relative_error(got[:, C:], want[:, C:]) < FLOAT32
    assert (relative_error(got[:, :C], want[:, :C]) < FLOAT32) == causal  # no chunk sees the one after it


def test_first_to_all_in_chunks_of_one_token_is_softmax_attention():
    for layout in ("whole", "padded", "packed"):
        masked = tensors(masks(layout), "float32")
        want = to_numpy(softmax_attention(heads(Q_QUAD), heads(K_QUAD), heads(V), **masked))[:, :, 0]
        assert relative_error(kernel(chunk_size=1, first_to_all="chunks", **masked), want) < FLOAT32


def test_first_to_all_changes_no_token_but_the_first():
    plain, at = kernel(), np.arange(V.shape[1])
    for rows, first in (("cls", at == 0), ("chunks", at % 5 == 0)):
        changed = (kernel(first_to_all=rows) != plain).any(axis=(0, 2))
        assert np.array_equal(changed, first), rows


def test_a_packed_document_has_a_first_token_where_it_starts_a_chunk_whether_or_not_that_is_padding():
    segments = np.repeat([[4, 7, 9]], [10, 12, 15], axis=1).repeat(2, axis=0)  # starts at 0, 10, and amid a chunk at 22
    plain, got = (kernel(segment_ids=segments, first_to_all=rows) for rows in ("none", "cls"))
    assert np.flatnonzero((plain != got).any(axis=(0, 2))).tolist() == [0, 10]
    hidden = np.ones(segments.shape, bool)
    hidden[:, 10] = False
    masked = {"segment_ids": segments, "padding_mask": hidden}
    plain, got = (kernel(**masked, first_to_all=rows) for rows in ("none", "cls"))
    assert np.flatnonzero((plain != got).any(axis=(0, 2))).tolist() == [0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({**NO_LINEAR, **NO_QUADRATIC}, "needs the queries and keys of one sum at least, got none"),
        ({"quad_q": None, "quad_k": None}, "they need quad_q, got None"),
        ({**NO_QUADRATIC, "overlapping": True}, "they need quad_q, got None"),
        ({**NO_QUADRATIC, "first_to_all": "cls"}, "they need quad_q, got None"),
        ({"first_to_all": "cls", "causal": True}, "must be 'none' if causal, got 'cls'"),
        ({"first_to_all": "all"}, "must be 'none', 'cls' or 'chunks', got 'all'"),
    ],
)
def test_the_kernel_refuses_what_it_would_leave_out(options, said):
    with pytest.raises(ValueError, match=said):
        kernel(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parts": "gau"}, "parts must be one of both, local, global, got 'gau'"),
        ({"parts": "global"}, r"parts 'global' needs relative_bias, .* got \(True, 'normalized', False, 'none'\)"),
        ({"parts": "global", "relative_bias": False, "overlapping": True}, r"needs .* got \(False, .*, True, 'none'\)"),
        ({"first_to_all": "chunks", "causal": True}, "first_to_all reads later tokens.* got 'chunks'"),
        ({"first_to_all": "first"}, "first_to_all must be 'none', 'cls' or 'chunks', got 'first'"),
    ],
)
def test_a_layer_refuses_at_construction_what_it_would_leave_out(options, said):
    with pytest.raises(ValueError, match=f"MixedChunkAttention: .*{said}"):
        MixedChunkAttention(**options)


@pytest.mark.parametrize(
    ("options", "kept", "heads"),
    [
        ({}, {"open", "sum"}, ["quad_q", "quad_k", "lin_q", "lin_k"]),
        (VARIANTS[0], {"open"}, ["quad_q", "quad_k"]),
        (VARIANTS[1], {"open", "sum"}, ["lin_q", "lin_k"]),
        (VARIANTS[2], {"open", "sum", "closed"}, ["quad_q", "quad_k", "lin_q", "lin_k"]),
    ],
)
def test_heads_and_state_are_those_that_are_used(options, kept, heads):
    layer = MixedChunkAttention(**{**LAYER, **options})
    layer.build((1, None, WIDTH))
    assert layer.offset_scale.heads == heads
    state = layer.initial_state(3)
    assert state.keys() == {*kept, "position"}
    slots = 2 * C if "closed" in kept else C
    assert tuple(state["open"].shape) == (3, slots, len(heads) // 2 * 8 + 2 * WIDTH)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_many_rows_close_their_chunks_at_any_pace_and_closing_twice_is_closing_once(options):
    layer, rng = MixedChunkAttention(**{**LAYER, **options}), np.random.default_rng(0)
    layer.build((1, None, WIDTH))
    rows, steps = 20, C + 1
    lengths = np.array([7] * 5 + [8] * 3 + [*range(1, 13)])  # more than two rows at once fill a chunk, and fewer
    x = rng.normal(size=(rows, 12 + steps, WIDTH)).astype("float32")
    want = to_numpy(layer(ops.convert_to_tensor(x)))
    _, state = layer.extend(
        ops.convert_to_tensor(x[:, :12]), layer.initial_state(rows), valid=ops.convert_to_tensor(lengths, "int32")
    )
    precomputed = layer.precompute(state)
    for step in range(steps):
        at = (lengths + step)[:, None, None]
        y, state = layer.extend(
            ops.convert_to_tensor(np.take_along_axis(x, at, axis=1)), state, precomputed=precomputed
        )
        (state,) = layer.flush([state])
        (again,) = layer.flush([state])
        assert all(np.array_equal(to_numpy(again[name]), to_numpy(state[name])) for name in state)
        assert relative_error(to_numpy(y), np.take_along_axis(want, at, axis=1)) < FLOAT32, step


def test_a_state_of_other_options_is_refused():
    layer, other = (MixedChunkAttention(**{**LAYER, "overlapping": overlapping}) for overlapping in (False, True))
    for one in (layer, other):
        one.build((1, None, WIDTH))
    with pytest.raises(ValueError, match="MixedChunkAttention needs a state of its own, with no closed, got closed"):
        layer.extend(ops.zeros((1, 2, WIDTH)), other.initial_state(1))
    heads, v = (ops.zeros((1, 2, 8)) for _ in range(2))
    state = decode.initial_state({"b": 1, "s": 8, "e": 8}, {"chunk_size": 4, "overlapping": True}, "float32")
    with pytest.raises(ValueError, match="needs a state made with overlapping=False, got one with True"):
        decode.extend(state, heads, heads, heads, heads, v, chunk_size=4)
