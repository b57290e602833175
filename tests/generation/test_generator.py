"""Batches of prompts: each row is continued as if it were alone, whole or as its tokens come."""

import functools

import keras
import numpy as np
import pytest

from flash_tf.generation import BeamSearch, Generator, Sampler
from flash_tf.models.causal_lm import CausalLM
from flash_tf.scoring import Scorer
from tests import tiers
from tests.contracts.test_streams import DECODERS, C, V, model_of, one_of_each_state, token_ids

STEPS = C + 3  # across the end of a chunk
LENGTHS = (1, C - 1, C, C + 1, 29)  # around the ends of chunks
DRAWN = Sampler(temperature=0.9, top_k=30, top_p=0.95)


@functools.cache
def shared(kind):
    """A model with the programs that it has compiled, for all tests that leave it as it is."""
    return model_of(kind, depth=1 if kind == "gau" else 2)  # FLASH tells what a second layer changes


def prompts():
    ids = token_ids(len(LENGTHS), max(LENGTHS))
    return [row[:length].tolist() for row, length in zip(ids, LENGTHS, strict=True)]


@one_of_each_state
def test_prompts_of_different_lengths_are_continued_as_each_alone(kind):
    model = shared(kind)
    together = model.generate(prompts(), STEPS)
    assert together == [model.generate([prompt], STEPS)[0] for prompt in prompts()]
    assert [len(row) for row in together] == [STEPS] * len(LENGTHS)


@pytest.mark.full
def test_a_prompt_is_continued_alike_whatever_it_is_padded_to():
    model, long = shared("flash"), token_ids(1, 70)[0].tolist()  # to 96, where alone the others are to 32
    assert model.generate([*prompts(), long], STEPS)[:-1] == model.generate(prompts(), STEPS)


@one_of_each_state
@pytest.mark.parametrize("sampler", ["greedy", pytest.param(DRAWN, id="drawn", marks=pytest.mark.full)])
def test_a_stream_yields_what_generate_returns(kind, sampler):
    model = shared(kind)
    streamed = list(model.stream(prompts(), STEPS, sampler, seed=5))
    assert np.transpose(streamed).tolist() == model.generate(prompts(), STEPS, sampler, seed=5)


def test_a_row_draws_by_the_seed_and_its_number_alone():
    model = shared("flash")
    first, *_ = together = model.generate(prompts(), STEPS, DRAWN, seed=5)
    assert model.generate(prompts(), STEPS, DRAWN, seed=5) == together
    assert model.generate(prompts()[:1], STEPS, DRAWN, seed=5) == [first]
    assert model.generate(prompts(), STEPS, DRAWN, seed=6) != together
    same = model.generate([prompts()[0]] * len(LENGTHS), STEPS, DRAWN, seed=5)
    assert same[0] != same[1]


def quantized(model):
    model.quantize("int8")


def with_lora(model):
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dense):
            layer.enable_lora(2)
            layer.lora_kernel_b.assign(np.random.default_rng(0).normal(size=layer.lora_kernel_b.shape))


@pytest.mark.parametrize("change", [quantized, pytest.param(with_lora, marks=pytest.mark.full)])
def test_a_model_with_other_variables_has_other_programs(change):
    model = model_of("flash", depth=1, head_projection=True)
    scorer, many = Scorer(model), 4 * C  # tokens: in fewer, int8 weights may choose the same ones
    pairs = [(np.array(prompt), 1) for prompt in prompts() if len(prompt) > 1]
    before = model.generate(prompts(), many), scorer.log_likelihoods(pairs)
    change(model)
    after = model.generate(prompts(), many), scorer.log_likelihoods(pairs)
    assert after == (Generator(model).generate(prompts(), many), Scorer(model).log_likelihoods(pairs)) != before
    assert np.transpose(list(model.stream(prompts(), many))).tolist() == after[0] != before[0]


def test_numbers_of_numpy_are_as_good():
    model, stops = shared("flash"), shared("flash").generate([[1]], STEPS)[0][-1:]
    want = model.generate([[1]], 4, "sample", seed=7, stop_tokens=stops)
    found = model.generate(np.array([[1]]), np.int64(4), "sample", seed=np.int32(7), stop_tokens=np.array(stops))
    assert found == want


@pytest.mark.parametrize("kind", tiers.thinned(DECODERS, "flash"))  # rows end by their tokens, whatever the state
def test_a_stop_token_ends_its_row_and_is_left_out(kind):
    model = shared(kind)
    whole = model.generate(prompts(), STEPS)
    stop = next(token for row in whole for token in row if row.index(token) > 1)
    want = [row[: row.index(stop)] if stop in row else row for row in whole]
    assert model.generate(prompts(), STEPS, stop_tokens=[stop]) == want
    rows = [[] for _ in want]
    for tokens in model.stream(prompts(), STEPS, stop_tokens=[stop]):
        for row, token in zip(rows, tokens, strict=True):
            row += [] if token is None else [token]
    assert rows == want


@pytest.mark.full
def test_a_stream_ends_with_its_last_row():
    model = shared("flash")
    ((*_, stop),) = model.generate(prompts()[:1], 3)
    assert len(list(model.stream(prompts()[:1], STEPS, stop_tokens=[stop]))) < 3


def test_new_weights_are_used_by_what_is_compiled():
    model = model_of("flash", depth=1)
    model.generate(prompts(), 3)
    weights = [np.random.default_rng(9).normal(size=w.shape) for w in model.weights]
    model.set_weights(weights)
    fresh = CausalLM.from_config(model.get_config())
    fresh.build()
    fresh.set_weights(weights)
    assert model.generate(prompts(), 3) == fresh.generate(prompts(), 3)


def test_learned_positions_are_used_to_the_last():
    model = CausalLM(
        V, width=16, depth=1, mixer={"type": "self_attention", "heads": 2}, position_embedding="learned", max_length=12
    )
    assert len(model.generate([[1, 2, 3, 4]], 8)[0]) == 8
    with pytest.raises(ValueError, match="reads at most 12 tokens, got a prompt of 4 and max_new_tokens=9"):
        model.generate([[1, 2, 3, 4], [1]], 9)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ([], {}, "prompts of 1 or more, got 0"),
        ([[1], []], {}, r"prompt 1 must be one token id or more, got \[\]"),
        ([[1.5]], {}, "prompt 0 must be one token id or more"),
        ([[1, V]], {}, f"token ids 0 to {V - 1}, prompt 0 has {V}"),
        ([[-1]], {}, f"token ids 0 to {V - 1}, prompt 0 has -1"),
        ([[1]], {"max_new_tokens": 0}, "integer max_new_tokens of 1 or more, got 0"),
        ([[1]], {"max_new_tokens": 2.5}, "integer max_new_tokens of 1 or more, got 2.5"),
        ([[1]], {"seed": -1}, "integer seed of 0 or more, got -1"),
        ([[1]], {"seed": 2**63}, "seed of at most 9223372036854775807, got 9223372036854775808"),
        ([[1]], {"stop_tokens": 3}, "stop_tokens must be one token id or more, got 3"),
        ([[1]], {"stop_tokens": [V]}, f"stop_tokens has {V}"),
        ([[1]], {"sampler": "lucky"}, "greedy, sample, beam, a Sampler or a BeamSearch, got 'lucky'"),
        ([[1]], {"sampler": {"top_k": 1}}, "greedy, sample, beam, a Sampler or a BeamSearch, got {'top_k': 1}"),
        (["a text", [1]], {}, "prompts must be all texts or all rows of ids, got both"),
        (["a text"], {}, "it has no tokenizer for texts"),
    ],
    ids=str,
)
def test_bad_arguments_are_one_clear_line(given, options, said):
    model = shared("flash")
    for method in (model.generate, model.stream):
        with pytest.raises(ValueError, match=said):
            method(given, **options)


def test_a_beam_cannot_stream_and_a_normalizer_of_the_whole_length_cannot_decode():
    with pytest.raises(ValueError, match="knows its best text only at the end"):
        shared("flash").stream([[1]], sampler=BeamSearch())
    mixer = {"type": "gau", "key_dim": 8, "divisor": "length"}
    model = CausalLM(V, width=16, depth=1, mixer=mixer)
    with pytest.raises(ValueError, match="cannot stream"):
        model.generate([[1]])
