"""Beam search against all continuations there are, and what ends one."""

import itertools

import numpy as np
import pytest
from keras import ops

from flash_tf.generation import BeamSearch
from flash_tf.models.causal_lm import CausalLM
from tests import tiers
from tests.backends import to_numpy
from tests.contracts.test_streams import DECODERS, model_of, token_ids

V, STEPS, PROMPT = 6, 3, 9


@pytest.fixture(scope="module")
def model():
    """A tiny model whose weights are large enough that texts differ in how likely they are."""
    model = CausalLM(V, width=16, depth=1, mixer={"type": "flash", "chunk_size": 4, "key_dim": 8})
    model.build()
    rng = np.random.default_rng(3)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    return model


def searched(texts, found, width):
    """Beam search over the table of all texts."""
    beam = [()]
    for step in range(STEPS):
        grown = {tuple(text[: step + 1]): row[: step + 1].sum() for text, row in zip(texts, found, strict=True)}
        alive = [text for text in grown if text[:-1] in beam]
        beam = sorted(alive, key=grown.get, reverse=True)[:width]
    return list(beam[0])


def table(model, prompt):
    """Every continuation of a prompt, and the log-probability of each of its tokens."""
    texts = np.array([[*prompt, *rest] for rest in itertools.product(range(V), repeat=STEPS)])
    logits = to_numpy(model(ops.convert_to_tensor(texts, "int32")))[:, PROMPT - 1 : -1]
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    rest = texts[:, PROMPT:]
    return rest, np.take_along_axis(logits, rest[..., None], axis=-1)[..., 0]


@pytest.fixture(scope="module")
def likelihoods(model):
    """A prompt, and every continuation of it with the log-probability of each token; greedy choice misses the best."""
    for seed in range(20):
        prompt = np.random.default_rng(seed).integers(0, V, PROMPT)
        rest, found = table(model, prompt)
        if searched(rest, found, 1) != rest[found.sum(-1).argmax()].tolist():
            return prompt.tolist(), rest, found
    raise AssertionError("no prompt for which greedy choice is not the best")


def test_a_beam_as_wide_as_all_prefixes_finds_the_likeliest_text(model, likelihoods):
    prompt, texts, found = likelihoods
    wide = BeamSearch(V, length_penalty=0.0)
    best = texts[found.sum(-1).argmax()].tolist()
    assert model.generate([prompt], STEPS, wide)[0] == best


def test_each_continuation_of_a_beam_keeps_its_own_state(model):
    prompts = np.random.default_rng(30).integers(0, V, [8, PROMPT])
    want = [searched(*table(model, prompt), 3) for prompt in prompts]
    assert model.generate(prompts.tolist(), STEPS, BeamSearch(3, length_penalty=0.0)) == want


@pytest.mark.parametrize("width", tiers.thinned([1, 3], 3))
def test_a_narrow_beam_keeps_the_likeliest_prefixes(model, likelihoods, width):
    prompt, texts, found = likelihoods
    assert model.generate([prompt], STEPS, BeamSearch(width))[0] == searched(texts, found, width)


@pytest.mark.parametrize("penalty", tiers.thinned([0.0, 3.0], 3.0))
def test_a_text_that_ends_competes_with_longer_ones_by_its_length(model, likelihoods, penalty):
    prompt, texts, found = likelihoods
    for stop in (1, 4):
        best, value = None, -np.inf
        for text, row in zip(texts.tolist(), found, strict=True):
            length = text.index(stop) + 1 if stop in text else STEPS
            if row[:length].sum() / length**penalty > value:
                best, value = text[: length - (stop in text)], row[:length].sum() / length**penalty
        # Six beams lose a prefix only if six others are likelier. Prefixes of this model's best texts are not lost.
        assert model.generate([prompt], STEPS, BeamSearch(V, penalty), stop_tokens=[stop])[0] == best, stop


@pytest.mark.parametrize("kind", tiers.thinned(DECODERS, "flash"))
def test_rows_of_a_batch_do_not_mix(kind):
    model = model_of(kind, depth=1 if kind == "gau" else 2)  # FLASH tells whether all layers follow
    ids = token_ids(3, 7).tolist()
    prompts = [ids[0], ids[1][:3], ids[2][:1]]
    alone = [model.generate([prompt], 5, "beam")[0] for prompt in prompts]
    assert model.generate(prompts, 5, "beam") == alone


def test_a_beam_wider_than_the_vocabulary_or_of_no_width_is_refused(model):
    with pytest.raises(ValueError, match="width 7 needs as many tokens in the vocabulary, which has 6"):
        model.generate([[1]], 2, BeamSearch(7))
    with pytest.raises(ValueError, match="width must be an integer of 1 or more, got 0"):
        BeamSearch(0)
