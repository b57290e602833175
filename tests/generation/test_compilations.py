"""How often XLA compiles while a model generates or scores: once for each program, whatever the position."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from flash_tf import scoring
from flash_tf.generation import generator
from flash_tf.models import CausalLM
from tests import tiers

PROMPTS = ([[5, 17, 3, 9], [8]], [[7, 2, 30, 41, 6, 1, 12], [3, 3]])  # padded to the same length
MIXERS = {
    "flash": {"chunk_size": 4, "key_dim": 8},
    "gau": {"key_dim": 8},
    "flash_weighted": {"chunk_size": 4, "key_dim": 8},
}


def by_xla(model, function, *arguments):
    return tf.function(function, autograph=False, jit_compile=True).get_concrete_function(*arguments)


def compilations(kind, dumped):
    """The programs that XLA compiled after the first use of each, by what it was used for."""
    generator.compiled = scoring.compiled = by_xla
    scoring.BLOCK = 8
    keras.utils.set_random_seed(1)
    model = CausalLM(50, width=16, depth=1, mixer={"type": kind, **MIXERS[kind]})
    model.build()
    count = lambda: len(list(Path(dumped).glob("*before_optimizations.txt")))  # noqa: E731
    found = {}

    def twice(name, use):
        use(PROMPTS[0], 0)
        before = count()
        assert before
        use(PROMPTS[1], 1)
        found[name] = count() - before

    def stream(prompts, seed):
        tokens = model.stream(prompts, max_new_tokens=14, seed=seed)
        next(tokens), next(tokens)
        before = count()
        assert len(list(tokens)) == 12
        found[f"stream after two tokens, seed {seed}"] = count() - before

    twice("stream", stream)
    for sampler in ("greedy", "sample", "beam"):
        twice(sampler, lambda prompts, seed, sampler=sampler: model.generate(prompts, 6, sampler, seed))
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


@pytest.mark.parametrize("kind", tiers.thinned(list(MIXERS), "flash"))
def test_xla_compiles_no_program_again_for_another_position_prompt_or_seed(kind, tmp_path):
    # XLA reads its flags once in a process.
    code = f"import {__name__} as test; print(test.json.dumps(test.compilations({kind!r}, {str(tmp_path)!r})))"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={tmp_path}"
    options = {"cwd": Path(__file__).parents[2], "env": {**os.environ, "XLA_FLAGS": flags}}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout)
    assert len(found) == 8 and set(found.values()) == {0}, found
