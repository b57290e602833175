"""The likelihood of documents and of continuations, against a softmax in float64 NumPy over one text alone."""

import json
import math

import numpy as np
import pytest
from keras import ops

from flash_tf import scoring
from flash_tf.data.sources.text_files import json_lines
from flash_tf.models.causal_lm import CausalLM
from flash_tf.scoring import Scorer, perplexities, windows
from tests import backends, numerics, tiers
from tests.backends import to_numpy

pytestmark = pytest.mark.one_backend
END = 1
MIXERS = {
    "flash": {"type": "flash", "chunk_size": 4, "key_dim": 8},
    "self_attention": {"type": "self_attention", "heads": 2, "rotary": True},
    "mamba": {"type": "mamba"},
}


class Letters:
    """A token for each letter, but one for "xy", which reaches over a border; a blank is none."""

    eos_id = END

    def encode(self, texts):
        spelled = (text.replace("xy", "Z").replace(" ", "") for text in texts)
        return [np.array([2 + ord(letter) % 32 for letter in text], np.int32) for text in spelled]


def make(mixer="flash", **options):
    backends.seed(3)
    model = CausalLM(40, width=16, depth=2, mixer=MIXERS[mixer], **options)
    model.build()
    for weight in model.trainable_variables:  # a fresh model says the same everywhere
        weight.assign(weight + 0.3 * np.random.default_rng(len(weight.path)).normal(size=weight.shape))
    rare = np.where((np.arange(40) > 2) & (np.arange(40) < 29), 0.0, -20.0)  # what no letter spells
    model.output_bias.assign(rare)
    model.tokenizer = Letters()
    return model


@pytest.fixture(scope="module")
def scorer():
    return Scorer(make())


def alone(model, ids, scored):
    """The log-likelihood of the last tokens of one row, and whether they are the likeliest."""
    logits = to_numpy(model(ops.convert_to_tensor([ids[:-1]])))[0].astype(np.float64)[-scored:]
    each = np.exp(logits - logits.max(-1, keepdims=True))
    each = np.log(each / each.sum(-1, keepdims=True))
    labels = np.array(ids[-scored:])
    return each[np.arange(scored), labels].sum(), bool((each.argmax(-1) == labels).all())


def test_a_document_is_predicted_from_the_end_of_another_to_its_own_end(scorer):
    model, text = scorer.model, "three small wörds"
    (found,) = scorer.documents([text])
    ids = [END, *Letters().encode([text])[0], END]
    assert found.pop("log_likelihood") == pytest.approx(alone(model, ids, len(ids) - 1)[0], rel=numerics.FLOAT32)
    assert found == {"tokens": 16, "words": 3, "characters": 17, "bytes": 18}


@pytest.mark.parametrize("mixer", tiers.thinned(list(MIXERS), "flash"))
def test_continuations_of_any_lengths_score_as_each_alone(mixer, scorer):
    scorer = scorer if mixer == "flash" else Scorer(make(mixer))
    model, letters = scorer.model, Letters()
    draw = np.random.default_rng(5)
    texts = ["".join(draw.choice(list("abcdefgh"), draw.integers(1, 60))) for _ in range(9)]
    pairs = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    for steps in (1, 3, 6):  # the model's own choices
        ids = [END, *letters.encode(["ab" * steps])[0]]
        for _ in range(steps):
            ids.append(int(to_numpy(model(ops.convert_to_tensor([ids])))[0, -1].argmax()))
        spelled = "".join(chr(94 + token) for token in ids[1:])
        if letters.encode([spelled])[0].tolist() == ids[1:]:
            pairs.append((spelled[: 2 * steps], spelled[2 * steps :]))
    found = scorer.continuations(pairs)
    assert len(pairs) > 9
    for (prefix, continuation), row in zip(pairs, found, strict=True):
        ids = [END, *letters.encode([prefix + continuation])[0]]
        want, greedy = alone(model, ids, len(continuation))
        assert row["log_likelihood"] == pytest.approx(want, rel=10 * numerics.FLOAT32)
        assert (row["tokens"], row["greedy"]) == (len(continuation), greedy)
    assert {row["greedy"] for row in found} == {True, False}


@pytest.mark.full
def test_a_document_is_its_prefix_and_then_the_rest(scorer):
    text = "abcdefghabcd"
    first, rest = scorer.continuations([("", text[:5]), (text[:5], text[5:])])
    (whole,) = scorer.continuations([("", text)])
    assert first["log_likelihood"] + rest["log_likelihood"] == pytest.approx(whole["log_likelihood"], rel=1e-5)


def test_a_token_over_the_border_belongs_to_the_continuation(scorer):
    (found,) = scorer.continuations([("abx", "yc")])  # a b xy c
    ids = [END, *Letters().encode(["abxyc"])[0]]
    assert found["tokens"] == 2
    assert found["log_likelihood"] == pytest.approx(alone(scorer.model, ids, 2)[0], rel=numerics.FLOAT32)
    with pytest.raises(ValueError, match="continuation 2 adds no tokens to its prefix"):
        scorer.continuations([("a", "b"), ("a", " ")])


def test_windows_score_each_token_once_with_enough_context():
    for length, scored, window, stride in (
        (50, 49, 8, 3),
        (50, 20, 8, 8),
        (50, 5, 8, 8),
        (9, 8, 8, 2),
        (30, 12, 20, 4),
    ):
        pieces = list(windows(np.arange(length), scored, window, stride))
        labels = [row[-count:].tolist() for row, count in pieces]
        assert sum(labels, []) == list(range(length - scored, length))
        assert max(len(row) for row, _ in pieces) <= window + 1
        context = [label - int(row[0]) for (row, _), own in zip(pieces, labels, strict=True) for label in own]
        assert all(c >= min(label, window - stride + 1) for c, label in zip(context, sum(labels, []), strict=True))
    (row, count), *others = windows(np.arange(50), 5, 8, 8)
    assert (row.tolist(), count, others) == (list(range(41, 50)), 5, [])
    assert [(row[0], row[-1], n) for row, n in windows(np.arange(20), 19, 8, 6)] == [(0, 8, 8), (6, 14, 6), (11, 19, 5)]


@pytest.mark.parametrize("mixer", tiers.thinned(["self_attention", "flash"], "self_attention"))
def test_a_long_document_scores_as_its_windows_alone(mixer):
    options = {"position_embedding": "learned", "max_length": 12} if mixer == "self_attention" else {}
    model, text = make(mixer, **options), "abcdefghij" * 4
    (found,) = Scorer(model, window=12, stride=5).documents([text])
    ids = np.array([END, *Letters().encode([text])[0], END])
    want = sum(alone(model, row.tolist(), count)[0] for row, count in windows(ids, 41, 12, 5))
    assert found["log_likelihood"] == pytest.approx(want, rel=numerics.FLOAT32)
    if options:
        with pytest.raises(ValueError, match="reads at most 12 tokens, got 41: score needs a window"):
            list(Scorer(model).documents([text]))


@pytest.mark.full
def test_a_long_text_is_read_in_blocks_that_hand_on_the_state(monkeypatch):
    monkeypatch.setattr(scoring, "BLOCK", 16)
    model, texts = make(), ["abcdefghij" * 5, "ab", "jihgf" * 5]
    for row, text in zip(Scorer(model).documents(texts), texts, strict=True):
        ids = [END, *Letters().encode([text])[0], END]
        assert row["log_likelihood"] == pytest.approx(alone(model, ids, len(text) + 1)[0], rel=numerics.FLOAT32)


def test_perplexities_are_of_one_likelihood_by_each_unit_of_the_text():
    row = {"log_likelihood": -12 * math.log(2), "tokens": 6, "words": 4, "characters": 8, "bytes": 24}
    assert perplexities(row) == pytest.approx(
        {
            "perplexity": 4,
            "word_perplexity": 8,
            "byte_perplexity": 2**0.5,
            "bits_per_byte": 0.5,
            "bits_per_character": 1.5,
        }
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 4}, "a stride belongs to a window"),
        ({"window": 4, "stride": 5}, "needs 1 <= stride <= window"),
        ({"window": 0}, "needs a window of 1 token or more, got 0"),
        ({"window": 13}, "reads at most 12 tokens, got window 13"),
    ],
)
def test_windows_that_do_not_fit_are_refused(options, message):
    model = make("self_attention", position_embedding="learned", max_length=12)
    with pytest.raises(ValueError, match=message):
        Scorer(model, **options)


def test_a_line_without_its_strings_is_named(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prefix": "a", "continuation": "b"}) + "\n\n" + json.dumps({"prefix": "a"}) + "\n")
    with pytest.raises(ValueError, match="pairs.jsonl, line 3 has no key 'continuation'"):
        list(json_lines(str(path), ("prefix", "continuation")))


def test_a_text_without_words_has_an_infinite_perplexity_of_words():
    found = perplexities({"log_likelihood": -3.0, "tokens": 1, "words": 0, "bytes": 1, "characters": 1})
    assert found["word_perplexity"] == math.inf and found["perplexity"] == found["byte_perplexity"] == math.exp(3)
