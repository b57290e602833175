"""Loss and perplexities of a hand-made model against NumPy."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from flash_tf import config
from flash_tf.data.packing import Packing
from flash_tf.data.stream import EvaluationBatches
from flash_tf.training import inputs
from flash_tf.training.evaluation import summarize
from flash_tf.training.evaluator import Evaluator, per_replica
from flash_tf.training.inputs import make_cache, make_tokenizer
from flash_tf.training.objective import CausalObjective
from tests import numerics
from tests.training import runs


class Bigrams(keras.Model):
    """Logits of the next token from a table, with a row for each token before it."""

    causal, vocabulary_size = True, runs.VOCABULARY

    def __init__(self, table):
        super().__init__()
        self.table = tf.constant(table, tf.float32)

    def call(self, tokens, segment_ids=None, training=None):
        return tf.gather(self.table, tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    runs.corpus(folder)
    return folder


@pytest.fixture(scope="module")
def table():
    return np.random.default_rng(0).normal(0, 2, [runs.VOCABULARY] * 2).astype(np.float32)


def evaluate(folder, table, packing, *, counts_words=True, windows=None):
    experiment = config.load(runs.write(folder, model={"type": "causal_lm"}, data={"packing": packing}))
    tokenizer = make_tokenizer(experiment, str(folder), chief=True, report=lambda line: None)
    cache = make_cache(experiment, str(folder), tokenizer, "validation", lambda *_: None)
    cut = Packing(kind=packing, sequence_length=runs.LENGTH, overlap=1, align=8)
    batches = EvaluationBatches(cache, cut, batch_size=4, windows=windows)
    evaluator = Evaluator(
        model=Bigrams(table),
        objective=CausalObjective(experiment, tokenizer),
        strategy=tf.distribute.get_strategy(),
        batches=lambda: batches,
        counts_words=counts_words,
    )
    return evaluator.evaluate(None), tokenizer


def by_hand(folder, table, tokenizer, packing):
    """Negative log-likelihood of every token of the validation text, with the ends of documents."""
    log_p = table - np.log(np.exp(table.astype(np.float64)).sum(axis=1, keepdims=True))
    texts = (folder / "validation.txt").read_text().splitlines()
    labels = [[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode(texts)]
    stream = [token for document in labels for token in document]
    before = [tokenizer.eos_id, *stream[:-1]]  # before a document's first token stands the end of the last document
    return -log_p[before, stream], np.array(stream), sum(len(text.split()) for text in texts)


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_every_token_is_predicted_once_and_the_figures_are_those_of_numpy(folder, table, packing):
    result, tokenizer = evaluate(folder, table, packing)
    nll, labels, words = by_hand(folder, table, tokenizer, packing)
    counts = np.unique(labels, return_counts=True)[1]
    shares = counts / counts.sum()
    assert result.pop("tokens") == len(labels)
    assert result.pop("words") == words
    want = {
        "loss": nll.mean(),
        "perplexity": math.exp(nll.mean()),
        "unigram_perplexity": math.exp(-(shares * np.log(shares)).sum()),
        "word_perplexity": math.exp(nll.sum() / words),
    }
    assert result == pytest.approx(want, rel=numerics.FLOAT32)


def test_word_perplexity_is_left_out_unless_asked_for_and_where_the_text_is_cut_short(folder, table):
    for options in ({"counts_words": False}, {"windows": 3}):
        result, _ = evaluate(folder, table, "concatenate", **options)
        assert set(result) == {"loss", "perplexity", "unigram_perplexity", "tokens"}
    assert result["tokens"] == 3 * runs.LENGTH


def test_a_model_that_knows_only_how_often_tokens_come_reaches_the_unigram_perplexity(folder):
    _, tokenizer = evaluate(folder, np.zeros([runs.VOCABULARY] * 2), "concatenate")
    _, labels, _ = by_hand(folder, np.zeros([runs.VOCABULARY] * 2), tokenizer, "concatenate")
    counts = np.bincount(labels, minlength=runs.VOCABULARY)
    with np.errstate(divide="ignore"):
        logits = np.maximum(np.log(counts / counts.sum()), -1e4)
    result, _ = evaluate(folder, np.tile(logits, [runs.VOCABULARY, 1]), "concatenate")
    assert result["perplexity"] == pytest.approx(result["unigram_perplexity"], rel=numerics.FLOAT32)


def test_summaries_are_exponentials_of_totals_and_overflow_to_infinity():
    result = summarize(12.0, np.array([2.0, 0.0, 2.0]), 3)
    assert result == pytest.approx(
        {"loss": 3.0, "perplexity": math.exp(3), "unigram_perplexity": 2.0, "tokens": 4,
         "word_perplexity": math.exp(4), "words": 3}
    )  # fmt: skip
    assert summarize(4e3, np.array([2.0]), None)["perplexity"] == math.inf


def test_no_thread_that_tunes_an_input_holds_up_the_end_of_its_iterator():
    context = tf.distribute.InputContext(num_replicas_in_sync=2)
    pipeline = per_replica(tf.data.Dataset.range(8).batch(4), 4, context)
    assert pipeline.options().autotune.enabled is False and [len(x) for x in pipeline] == [2] * 4


@pytest.mark.parametrize(
    ("length", "tokens", "accumulate", "replicas", "rows"),
    [
        (512, 2**16, 1, 1, 32),  # 2^14 tokens
        (512, 2**13, 1, 1, 16),  # the batch of training
        (512, 2**16, 8, 1, 16),  # its micro-batch
        (512, 2**16, 1, 8, 128),  # of 16 on each replica
        (2**15, 2**17, 1, 2, 2),  # one on each replica
    ],
)
def test_an_evaluation_takes_less_memory_than_a_training_step(length, tokens, accumulate, replicas, rows):
    sizes = [f"data.sequence_length={length}", f"train.tokens_per_step={tokens}", f"train.accumulate={accumulate}"]
    assert inputs.evaluated_rows(config.load("wikipedia_lm/flash", sizes), replicas) == rows
