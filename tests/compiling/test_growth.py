"""The growth of a compiled training step's cost with the sequence length. Nothing is run."""

import itertools
import math

import pytest

from flash_tf import config
from flash_tf.compiling import artifact, tpu
from flash_tf.compiling.programs import Experiment
from tests.numerics import LINEAR, QUADRATIC

SMALL = ["model.width=32", "model.depth=1", "model.vocabulary_size=100", "train.tokens_per_step=1024"]
# The costs are counted for a CPU, which casts all of a bfloat16 tensor to update a part of it.
SMALL += ["train.precision=float32"]
SHAPE = "key_dim: 16, expansion: 2"


def costs(mixer, lengths):
    """Of one sequence, at each length."""
    settings = [*SMALL, "data.sequence_length=1024", f"model.mixer={mixer}"]
    experiment = Experiment(*artifact.resolve(config.load("lm_pg19/flash", settings)))
    return [tpu.analyse(experiment.trace_step(1, n).serialized) for n in lengths]


@pytest.mark.full
def test_a_step_of_flash_is_linear_in_the_length_from_a_thousand_tokens_to_a_million():
    lengths = 2**10, 2**15, 2**20
    found = costs(f"{{type: flash, chunk_size: 64, {SHAPE}}}", lengths)
    for name in ("flops", "bytes", "hbm_bytes"):
        by_token = [one[name] / n for one, n in zip(found, lengths, strict=True)]
        # A token may cost less of a long text: weights and the head's block are there once.
        pairs = itertools.combinations(by_token, 2)
        assert all(longer <= LINEAR * shorter for shorter, longer in pairs), (name, by_token)


@pytest.mark.full
def test_a_step_of_flash_quad_is_quadratic():
    lengths = 2**15, 2**18
    found = costs(f"{{type: gau, {SHAPE}}}", lengths)
    for name in ("flops", "bytes", "hbm_bytes"):
        exponent = math.log2(found[1][name] / found[0][name]) / math.log2(lengths[1] / lengths[0])
        assert abs(exponent - 2) <= QUADRATIC, name
