import numpy as np
import pytest
import tensorflow as tf

from flash_tf.data import masking
from flash_tf.data.masking import mask_tokens

PAD, MASK = 0, 4
SPECIAL = [0, 1, 2, 3, 4, 60, 99]
V = 100
RNG = np.random.default_rng(0)
STARTS = RNG.random(V) < 0.6
ARGUMENTS = {"special_ids": SPECIAL, "mask_id": MASK, "vocabulary_size": V, "padding_id": PAD}
WAYS = [None, STARTS]


def a_batch(b: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random tokens with specials among them and padding at the end, window numbers, and segment ids."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, V, (b, n)).astype(np.int32)
    segments = np.sort(draw.integers(1, 4, (b, n)), axis=1).astype(np.int32)
    padding = np.arange(n) >= draw.integers(0, n + 1, (b, 1))
    window = np.stack([draw.integers(0, 3, b), draw.permutation(1000)[:b]], axis=1).astype(np.int32)
    return np.where(padding, PAD, tokens), window, np.where(padding, 0, segments)


def mask(tokens, window, *, seed=1, **options) -> masking.MaskedBatch:
    out = mask_tokens(tf.constant(tokens), tf.constant(window), seed=seed, **ARGUMENTS | options)
    return masking.MaskedBatch(*(part.numpy() for part in out))


def chosen(masked: masking.MaskedBatch) -> np.ndarray:
    """Which positions have weight 1, bool `[b, n]`."""
    out = np.zeros(masked.inputs.shape, int)
    rows = np.broadcast_to(np.arange(len(out))[:, None], masked.positions.shape)
    np.add.at(out, (rows, masked.positions), masked.weights.astype(int))
    assert out.max() <= 1
    return out.astype(bool)


def ordinary(n: int, b: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows 0 … b - 1 of epoch 0, with only maskable tokens."""
    tokens = np.random.default_rng(5).choice(np.setdiff1d(np.arange(V), SPECIAL), (b, n)).astype(np.int32)
    return tokens, np.stack([np.zeros(b), np.arange(b)], axis=1).astype(np.int32)


def words_of(tokens, segments) -> list[list[int]]:
    """The positions of each word of one window, found the slow way."""
    words = []
    for i, token in enumerate(tokens):
        if token in SPECIAL:
            continue
        goes_on = i and not STARTS[token] and tokens[i - 1] not in SPECIAL and segments[i] == segments[i - 1]
        if goes_on:
            words[-1].append(i)
        else:
            words.append([i])
    return words


@pytest.mark.parametrize(("n", "rate"), [(4, 0.3), (10, 0.15), (30, 0.15), (50, 0.5), (128, 0.15), (7, 0.95)])
def test_each_row_has_exactly_the_rounded_share_of_its_maskable_tokens(n, rate):
    tokens, window, segments = a_batch(64, n, seed=n)
    masked = mask(tokens, window, rate=rate, segment_ids=segments)
    assert masked.positions.shape == masked.labels.shape == masked.weights.shape == (64, round(rate * n))
    assert masked.weights.dtype == np.float32
    maskable = ~np.isin(tokens, SPECIAL)
    assert masked.weights.sum(axis=1).tolist() == [round(rate * count) for count in maskable.sum(axis=1).tolist()]
    assert not (chosen(masked) & ~maskable).any()


@pytest.mark.parametrize("starts", WAYS, ids=["tokens", "words"])
@pytest.mark.parametrize("n", [8, 33, 128])
def test_labels_are_the_original_tokens_and_all_else_is_unchanged(n, starts):
    tokens, window, segments = a_batch(32, n, seed=n)
    masked = mask(tokens, window, starts_word=starts, segment_ids=segments)
    assert ((masked.positions >= 0) & (masked.positions < n)).all()
    np.testing.assert_array_equal(masked.labels, np.take_along_axis(tokens, masked.positions, axis=1))
    np.testing.assert_array_equal(masked.inputs[~chosen(masked)], tokens[~chosen(masked)])


def test_a_packed_row_is_not_masked_where_its_segment_id_is_zero():
    tokens, window = ordinary(64, 16)
    segments = np.repeat([[1, 0, 2, 0]], 16, axis=1).repeat(16, axis=0).astype(np.int32)
    masked = mask(tokens, window, segment_ids=segments)
    assert not chosen(masked)[segments == 0].any()
    assert (masked.weights.sum(axis=1) == round(0.15 * 32)).all()


@pytest.mark.parametrize("starts", [pytest.param(None, marks=pytest.mark.full), STARTS], ids=["tokens", "words"])
def test_eager_graph_and_xla_agree(starts):
    tokens, window, segments = a_batch(16, 96)
    starts = None if starts is None else tf.constant(starts)

    def call(tokens, window, segments):
        return mask_tokens(tokens, window, seed=9, starts_word=starts, segment_ids=segments, **ARGUMENTS)

    inputs = [tf.constant(part) for part in (tokens, window, segments)]
    eager = call(*inputs)
    for compiled in (tf.function(call), tf.function(call, jit_compile=True)):
        for one, other in zip(eager, compiled(*inputs), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("starts", WAYS, ids=["tokens", "words"])
def test_the_masks_of_a_row_do_not_depend_on_its_batch(starts):
    tokens, window, segments = a_batch(12, 40)
    whole = mask(tokens, window, starts_word=starts, segment_ids=segments)
    for rows in ([3], [7, 2], list(range(11, -1, -1))):
        part = mask(tokens[rows], window[rows], starts_word=starts, segment_ids=segments[rows])
        for one, other in zip(part, whole, strict=True):
            np.testing.assert_array_equal(one, other[rows])


def test_chosen_tokens_are_eighty_ten_ten_masked_replaced_and_kept():
    tokens, window = ordinary(200, 2000)
    masked = mask(tokens, window)
    picked = chosen(masked)
    before, after = tokens[picked], masked.inputs[picked]
    shares = [np.mean(after == MASK), np.mean((after != MASK) & (after != before)), np.mean(after == before)]
    # Of 93 ordinary tokens a random one is the old one in 1/93. 60,000 draws: five deviations of 0.8 are 0.008.
    np.testing.assert_allclose(shares, [0.8, 0.1 * 92 / 93, 0.1 + 0.1 / 93], atol=0.008)


def test_what_happens_to_a_token_is_independent_of_what_happens_to_its_neighbour():
    tokens, window = ordinary(200, 2000)
    masked = mask(tokens, window, rate=0.9)
    became_mask = masked.inputs == MASK
    both = chosen(masked)[:, :-1] & chosen(masked)[:, 1:]
    table = np.histogram2d(became_mask[:, :-1][both], became_mask[:, 1:][both], bins=2)[0] / both.sum()
    np.testing.assert_allclose(table, np.outer([0.2, 0.8], [0.2, 0.8]), atol=0.005)


def test_replacements_are_uniform_over_the_ordinary_tokens():
    place, window = tf.broadcast_to(tf.range(500), (400, 500)), tf.constant(ordinary(1, 400)[1])
    drawn = masking._ordinary(place, window, 3, SPECIAL, V).numpy()
    counts = np.bincount(drawn.ravel(), minlength=V)
    assert len(counts) == V and not counts[SPECIAL].any()
    rest = np.delete(counts, SPECIAL)
    assert chi_square(rest) < 92 + 5 * np.sqrt(2 * 92)


def test_special_tokens_outside_the_vocabulary_do_not_reduce_the_replacements():
    tokens, window = ordinary(200, 500)
    masked = mask(tokens, window, special_ids=[*SPECIAL, V, V + 1])
    replaced = chosen(masked) & (masked.inputs != MASK)
    assert np.unique(masked.inputs[replaced]).tolist() == np.setdiff1d(np.arange(V), SPECIAL).tolist()


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def bits(rows: int = 512, n: int = 256, epoch: int = 0, seed: int = 0, purpose: int = 0) -> np.ndarray:
    window = tf.stack([tf.fill([rows], epoch), tf.range(rows)], axis=1)
    return masking._random_bits(tf.broadcast_to(tf.range(n), (rows, n)), window, seed, purpose).numpy()


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_every_byte_of_the_hash_is_uniform(seed, shift):
    counts = np.bincount((bits(seed=seed).ravel() >> shift) & 255, minlength=256)
    assert chi_square(counts) < 255 + 5 * np.sqrt(2 * 255)


NEIGHBOURS = {
    "position": lambda: (bits()[:, :-1], bits()[:, 1:]),
    "row": lambda: (bits()[:-1], bits()[1:]),
    "epoch": lambda: (bits(), bits(epoch=1)),
    "seed": lambda: (bits(), bits(seed=1)),
    "purpose": lambda: (bits(), bits(purpose=1)),
    "row and position": lambda: (bits()[:-1, 1:], bits()[1:, :-1]),
    "epoch and row": lambda: (bits()[1:], bits(epoch=1)[:-1]),
    "seed and purpose": lambda: (bits(seed=1), bits(purpose=1)),
}


@pytest.mark.parametrize("what", NEIGHBOURS)
def test_hashes_that_differ_in_one_argument_are_independent(what):
    one, other = (part.ravel() for part in NEIGHBOURS[what]())
    counts = np.bincount((one >> 28) * 16 + (other >> 28), minlength=256)
    assert chi_square(counts) < 255 + 5 * np.sqrt(2 * 255)
    flipped = np.unpackbits((one ^ other).view(np.uint8)).reshape(-1, 32).mean(axis=0)
    np.testing.assert_allclose(flipped, 0.5, atol=0.01)  # 131,072 draws: a deviation is 0.0014


def test_no_two_counters_of_a_row_have_the_same_hash():
    row = bits(rows=1, n=1 << 17)[0]
    assert len(np.unique(row)) == len(row)


@pytest.mark.parametrize("epochs", [(0, 1), (0, 2)])
def test_positions_are_chosen_evenly_and_anew_in_every_epoch(epochs):
    tokens, window = ordinary(100, 4000)
    one, other = (chosen(mask(tokens, window + np.array([[epoch, 0]], np.int32))) for epoch in epochs)
    assert chi_square(one.sum(axis=0)) < 99 + 5 * np.sqrt(2 * 99)
    assert abs((one & other).mean() - 0.15**2) < 0.002


@pytest.mark.parametrize("n", [12, 50, 200])
@pytest.mark.parametrize("seed", range(3))
def test_words_are_chosen_whole_up_to_the_first_that_the_budget_would_cut(n, seed):
    tokens, window, segments = a_batch(64, n, seed)
    masked = mask(tokens, window, starts_word=STARTS, segment_ids=segments)
    for row, (ids, groups) in enumerate(zip(tokens, segments, strict=True)):
        words, picked = words_of(ids, groups), chosen(masked)[row]
        budget = round(0.15 * sum(map(len, words)))
        fitting = [word for word in words if len(word) <= budget]
        left = [word for word in fitting if not picked[word].any()]
        assert all(picked[word].all() for word in fitting if word not in left)
        assert picked.sum() == sum(len(word) for word in fitting if word not in left) <= budget
        assert not left or picked.sum() + max(map(len, left)) > budget
        assert bool(fitting) == bool(picked.any())


def test_a_word_longer_than_the_budget_does_not_empty_its_row():
    tokens, window = ordinary(40, 200)
    starts = np.zeros(V, bool)
    starts[50] = True
    tokens = np.where(tokens == 50, 51, tokens)
    tokens[:, 30:] = 50  # one word of 30 tokens, ten of one; the budget is 6
    masked = mask(tokens, window, starts_word=starts)
    assert (chosen(masked)[:, 30:].sum(axis=1) == 6).all()
    assert not chosen(masked)[:, :30].any()


def test_all_words_that_fit_are_chosen_about_equally_often():
    tokens, window = ordinary(60, 4000)
    starts = np.arange(V) == 50
    tokens = np.where(tokens == 50, 51, tokens)
    tokens[:, ::2] = 50  # thirty words of two tokens; the budget is 9, so four of them
    counts = chosen(mask(tokens, window, starts_word=starts)).sum(axis=0)
    assert counts.sum() == 8 * 4000
    assert chi_square(counts[::2]) < 29 + 5 * np.sqrt(2 * 29)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "got 0.0"),
        ({"rate": 1.0}, "got 1.0"),
        ({"rate": 0.01}, "chooses a token or more of 10, got 0.01"),
        ({"vocabulary_size": 5, "special_ids": [0, 1, 2, 3]}, "got 5 tokens, 5 special"),
    ],
)
def test_masking_that_could_choose_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        mask(*ordinary(10, 2), **options)
