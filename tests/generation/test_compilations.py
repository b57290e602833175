"""How often XLA compiles while a model generates or scores: once for each program, whatever the position."""

import functools
import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from flash_tf import scoring
from flash_tf.generation import generator
from flash_tf.models import CausalLM
from tests import backends, tiers
from tests.numerics import FLOAT32, relative_error
from tests.training import runs

PROMPTS = ([[5, 17, 3, 9], [8]], [[7, 2, 30, 41, 6, 1, 12], [3, 3]])  # padded to the same length
MIXERS = {
    "flash": {"chunk_size": 4, "key_dim": 8},
    "gau": {"key_dim": 8},
    "flash_weighted": {"chunk_size": 4, "key_dim": 8},
}


def programs(dumped):
    """How many programs XLA has compiled in this process."""
    return len(list(Path(dumped).glob("*before_optimizations.txt")))


def compilations(kind, dumped):
    """The programs that XLA compiled after the first use of each, by what it was used for."""
    generator.takes_xla = lambda: True
    scoring.BLOCK = 8
    backends.seed(1)
    model = CausalLM(50, width=16, depth=1, mixer={"type": kind, **MIXERS[kind]})
    model.build()
    found, count = {}, functools.partial(programs, dumped)

    def twice(name, use):
        use(PROMPTS[0], 0)
        before = count()
        assert before
        use(PROMPTS[1], 1)
        found[name] = count() - before

    def stream(prompts, seed):
        tokens = model.stream(prompts, max_new_tokens=14 + seed, seed=seed)
        next(tokens), next(tokens)
        before = count()
        assert len(list(tokens)) == 12 + seed
        found[f"stream after two tokens, seed {seed}"] = count() - before

    twice("stream", stream)
    for sampler in ("greedy", "sample", "beam"):
        twice(sampler, lambda prompts, seed, sampler=sampler: model.generate(prompts, 6 + seed, sampler, seed))
    step = tf.function(lambda tokens, state: model.extend(tokens, state), autograph=False, jit_compile=True)

    def steps(prompts, seed):
        state = model.initial_state(1, 12 if model.grows else None)
        for token in prompts[0][:4]:
            _, state = step(tf.constant([[token]]), state)

    steps([[1]], 0)
    before = count()
    steps(PROMPTS[1], 0)
    found["single steps"] = count() - before
    scorer, texts = scoring.Scorer(model, window=8 if model.grows else None), [np.arange(1, n) % 50 for n in (30, 28)]
    twice("score", lambda prompts, seed: scorer.log_likelihoods([(texts[seed], 20)]))
    return found


def served(name, dumped, jit_compile):
    """Programs after each token that an exported model's `decode_step` reads, and after its `generate`, twice.

    XLA compiles them if the export says so, else a program of the user's around `decode_step`.
    """
    from tests.exporting import models  # which other children of this module do without: it takes seconds

    model_dir = models.directory(Path(dumped, "run"), models.sections()[name])
    run, _ = models.exported(model_dir, Path(dumped, "out"), ids_only=True, jit_compile=jit_compile)
    loaded, found = tf.saved_model.load(f"{dumped}/out"), []  # kept: its signatures do not keep it
    step = signature = loaded.signatures["decode_step"]
    if not jit_compile:
        step = tf.function(lambda **given: signature(**given), autograph=False, jit_compile=True)
    state = loaded.signatures["initial_state"](batch_size=tf.constant(2))
    for token in range(4, 16):  # across the end of a chunk
        state = dict(step(token=tf.constant([token, 5]), **state))
        logits = state.pop("logits").numpy()
        found.append(programs(dumped))
    assert state["position"].numpy().tolist() == [12, 12]
    want = run.model(np.array([range(4, 16), [5] * 12]))[:, -1]
    for prompt in ([[5, 6, 7], [8, 9, 10]], [[11, 12, 13, 14, 15], [6, 7, 0, 0, 0]]):
        loaded.signatures["generate"](ids=tf.constant(prompt))
        found.append(programs(dumped))
    return found, relative_error(logits, want)


def flagged(function, name, folder):
    """What a function gives in a process that writes each program of XLA into a folder."""
    # XLA reads its flags when a process first compiles: a child of the server of processes has not, until now.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
    return function(name, folder)


@pytest.mark.parametrize("kind", tiers.thinned(list(MIXERS), "flash"))
def test_xla_compiles_no_program_again_for_another_position_prompt_length_or_seed(kind, tmp_path):
    found = runs.in_child(flagged, compilations, kind, str(tmp_path))
    assert len(found) == 8 and set(found.values()) == {0}, found


@pytest.mark.full
@pytest.mark.parametrize("name", ["causal-flash", "causal-flash_quad"])  # a state of one size, and a cache that grows
@pytest.mark.parametrize("jit_compile", [False, True])
def test_xla_compiles_a_step_of_an_exported_model_once(name, jit_compile, tmp_path):
    of = functools.partial(served, jit_compile=jit_compile)
    (first, *steps, one, other), error = runs.in_child(flagged, of, name, str(tmp_path))
    assert len(steps) == 11 and steps[0] > 0 and set(steps) == {steps[0]}, (first, steps)
    assert one == other and (one > steps[0]) == jit_compile, (steps, one, other)
    assert error < FLOAT32
