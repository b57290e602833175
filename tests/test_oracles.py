"""The oracles themselves, against numbers worked out by hand and properties that the formulas have."""

import numpy as np

from tests.numerics import FLOAT64, relative_error
from tests.oracles.common import rotate, scaled_sin
from tests.oracles.formulas.flash import flash
from tests.oracles.formulas.gau import gau
from tests.oracles.formulas.gla import gla
from tests.oracles.formulas.linear_attention import linear_attention
from tests.oracles.formulas.norms import scale_norm
from tests.oracles.formulas.retention import retention
from tests.oracles.formulas.rotary import rotary
from tests.oracles.formulas.softmax_attention import softmax_attention


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def heads(*tokens):
    """`[1, n, 1, width]` of one row and one head."""
    return np.array(tokens, float)[None, :, None, :]


def test_rotary_turns_the_first_pair_by_one_radian_a_token():
    x = np.zeros([1, 1, 1, 4])
    x[..., 0] = 1
    turned = rotary(x, np.array([[3]]))[0, 0, 0]
    assert relative_error(turned, [np.cos(3), 0, np.sin(3), 0]) < FLOAT64


def test_rotary_turns_the_last_of_two_pairs_by_a_hundredth_of_a_radian_a_token():
    x = np.zeros([1, 1, 1, 4])
    x[..., 3] = 1
    turned = rotary(x, np.array([[3]]))[0, 0, 0]
    assert relative_error(turned, [0, -np.sin(0.03), 0, np.cos(0.03)]) < FLOAT64


def test_products_of_rotated_vectors_depend_on_the_distance_alone():
    a, b = normal(8), normal(8, seed=1)
    assert relative_error(rotate(a, 1007) @ rotate(b, 1003), rotate(a, 4) @ rotate(b, 0)) < FLOAT64


def test_scaled_sin_is_sines_and_then_cosines():
    table = scaled_sin(np.array([0, 2]), 4, 0.5)
    by_hand = [[0, 0, 0.5, 0.5], 0.5 * np.array([np.sin(2), np.sin(0.02), np.cos(2), np.cos(0.02)])]
    assert relative_error(table, by_hand) < FLOAT64


def test_scale_norm_leaves_the_root_mean_square_g():
    assert (
        relative_error(scale_norm(np.array([[[3.0, 4.0]]]), 2.0, epsilon=0), [[[6 / 12.5**0.5, 8 / 12.5**0.5]]])
        < FLOAT64
    )


def test_quadratic_of_two_tokens_is_as_by_hand():
    q, k, v = heads([2, 0, 0, 0], [0, 4, 0, 0]), heads([1, 1, 0, 0], [0, 3, 0, 0]), heads([1, 10], [100, 1000])
    # Products q·k/√4: 1 and 0 for the first query, 2 and 6 for the second; squared and halved: ½, 0 and 2, 18.
    assert relative_error(gau(q, k, v), heads([0.5, 5], [1802, 18020])) < FLOAT64
    # A causal first token counts itself alone.
    assert relative_error(gau(q, k, v, causal=True), heads([1, 10], [1802, 18020])) < FLOAT64
    assert relative_error(gau(q, k, v, causal=True, divisor="length"), heads([0.5, 5], [1802, 18020])) < FLOAT64
    # Products over 4, squared: ¼, 0 and 1, 9.
    got = gau(q, k, v, scale="paper_appendix", divisor=4)
    assert relative_error(got, heads([0.25, 2.5], [901, 9010])) < FLOAT64


def test_the_bias_of_the_appendix_is_not_divided():
    q = k = np.zeros([1, 1, 1, 2])
    a, b = np.array([3.0, 0]), np.array([1.0, 0])
    got = gau(q, k, heads([1]), a, b, scale="paper_appendix", divisor=7)
    assert relative_error(got, heads([9])) < FLOAT64
    assert relative_error(gau(q, k, heads([1]), a, b, divisor=7), heads([9 / 7])) < FLOAT64


def test_mixed_chunk_adds_the_linear_sum_of_earlier_chunks():
    ones, v = np.ones([1, 5, 1]), np.array([1.0, 10, 100, 1000, 10000])[None, :, None]
    got = flash(ones, ones, 3 * ones, ones, v, chunk_size=2, causal=True)[0, :, 0]
    first, second = 3 * 11 / 2, 3 * 1111 / 4
    assert relative_error(got, [0.5, 5.5, 50 + first, 550 + first, 5000 + second]) < FLOAT64


def test_mixed_chunk_adds_the_linear_mean_of_all_tokens_unless_causal():
    ones, v = np.ones([1, 3, 1]), np.array([1.0, 10, 100])[None, :, None]
    got = flash(ones, ones, 3 * ones, ones, v, chunk_size=2)[0, :, 0]
    assert relative_error(got, [5.5 + 111, 5.5 + 111, 50 + 111]) < FLOAT64


def test_one_chunk_of_causal_mixed_chunk_is_quadratic_with_a_constant_divisor():
    q, k, v, a, b = normal(2, 6, 4), normal(2, 6, 4, seed=1), normal(2, 6, 3, seed=2), normal(4), normal(4, seed=3)
    whole = gau(q[:, :, None], k[:, :, None], v[:, :, None], a, b, causal=True, divisor=6)[:, :, 0]
    assert relative_error(flash(q, k, q, k, v, a, b, chunk_size=6, causal=True), whole) < FLOAT64


def test_softmax_of_equal_scores_is_the_mean_of_the_visible_values():
    q, v = np.zeros([1, 4, 1, 2]), heads([1], [2], [6], [100])
    mask = np.array([[True, True, True, False]])
    assert relative_error(softmax_attention(q, q, v, padding_mask=mask), heads([3], [3], [3], [0])) < FLOAT64
    assert (
        relative_error(softmax_attention(q, q, v, causal=True, padding_mask=mask), heads([1], [1.5], [3], [0]))
        < FLOAT64
    )


def test_softmax_divides_scores_by_the_root_of_the_width():
    q, k, v = heads([2, 0, 0, 0]), heads([0, 0, 0, 0], [np.log(3), 0, 0, 0]), heads([0], [4])
    assert relative_error(softmax_attention(np.repeat(q, 2, axis=1), k, v), heads([3], [3])) < FLOAT64


def test_masks_leave_what_the_real_tokens_of_one_document_give_alone():
    x, segments = normal(1, 9, 2, 4), np.array([[5, 5, 5, 5, 2, 2, 2, 0, 0]])
    mask = np.array([[True, True, False, True, True, True, True, True, True]])
    for oracle in (gau, softmax_attention):
        got = oracle(x, x, x, causal=True, padding_mask=mask, segment_ids=segments)
        for kept in ([0, 1, 3], [4, 5, 6]):
            assert relative_error(got[:, kept], oracle(x[:, kept], x[:, kept], x[:, kept], causal=True)) < FLOAT64
        assert not got[:, [2, 7, 8]].any()


def test_a_document_in_mixed_chunk_counts_its_own_real_tokens_on_the_grid_of_the_row():
    ones, v = np.ones([1, 6, 1]), np.array([1.0, 10, 100, 1000, 10000, 100000])[None, :, None]
    # Chunks of 2: the second document begins amid the second chunk, and its token 4 is padding.
    segments, mask = np.array([[1, 1, 1, 2, 2, 2]]), np.array([[True, True, True, True, False, True]])
    got = flash(ones, ones, ones, ones, v, chunk_size=2, causal=True, padding_mask=mask, segment_ids=segments)
    assert relative_error(got[0, :, 0], [0.5, 5.5, 50 + 11 / 2, 500, 0, 50000 + 1000]) < FLOAT64


def test_linear_attention_of_two_tokens_is_as_by_hand():
    q, k, v = heads([2, 0], [1, 3]), heads([1, 1], [0, 3]), heads([1, 10], [100, 1000])
    # Products: 2 and 0 for the first query, 4 and 9 for the second.
    assert relative_error(linear_attention(q, k, v), heads([2, 20], [904, 9040])) < FLOAT64
    assert relative_error(linear_attention(q, k, v, normalized=True), heads([1, 10], [904 / 13, 9040 / 13])) < FLOAT64
    q[0, 0, 0] = [0, 1]  # products of the first query: 1 and 3
    assert relative_error(linear_attention(q, k, v, causal=True), heads([1, 10], [904, 9040])) < FLOAT64
    got = linear_attention(q, k, v, causal=True, normalized=True)
    assert relative_error(got, heads([1, 10], [904 / 13, 9040 / 13])) < FLOAT64


def test_decays_are_of_the_tokens_after_the_key_up_to_the_query_as_by_hand():
    ones, v = np.ones([1, 3, 1, 1]), heads([1], [10], [100])
    a = np.log([[[0.1], [0.5], [0.25]]])  # the first token's has nothing to act on
    assert relative_error(retention(ones, ones, v, a), heads([1], [10.5], [100 + 2.5 + 0.125])) < FLOAT64
    mask = np.array([[True, False, True]])
    got = retention(ones, ones, v, a, padding_mask=mask)
    assert relative_error(got, heads([1], [0], [100 + 0.25])) < FLOAT64


def test_gates_act_on_the_channels_of_keys_as_by_hand():
    q, k, v = heads([1, 1], [1, 10]), heads([3, 5], [0, 0]), heads([1], [1])
    a = np.log(np.array([[[[1.0, 1.0]], [[0.5, 0.1]]]]))
    assert relative_error(gla(q, k, v, a), heads([8], [1.5 + 10 * 0.5])) < FLOAT64


def test_gates_of_values_act_on_their_channels_as_by_hand():
    q, k, v = heads([1, 1], [1, 10]), heads([3, 5], [0, 0]), heads([1, 2], [1, 1])
    b = np.log(np.array([[[[1.0, 1.0]], [[0.5, 0.25]]]]))
    assert relative_error(gla(q, k, v, value_log_decay=b), heads([8, 16], [53 * 0.5, 53 * 2 * 0.25])) < FLOAT64
    a = np.log(np.array([[[[1.0, 1.0]], [[0.5, 0.1]]]]))
    assert relative_error(gla(q, k, v, a, b), heads([8, 16], [6.5 * 0.5, 6.5 * 2 * 0.25])) < FLOAT64


def test_a_document_of_a_decayed_state_starts_from_nothing():
    q, k, a = (normal(1, 6, 2, 4, seed=seed) for seed in range(3))
    v, a = normal(1, 6, 2, 3, seed=3), -np.abs(a)
    got = gla(q, k, v, a, segment_ids=np.array([[2, 2, 2, 9, 9, 9]]))
    for part in (slice(0, 3), slice(3, 6)):
        assert relative_error(got[:, part], gla(q[:, part], k[:, part], v[:, part], a[:, part])) < FLOAT64
