"""Training from text to perplexity, end to end."""

import random

import pytest

from flash_tf import config
from flash_tf.training import loop
from tests.training import runs


def recite(folder):
    """Text in which each word decides the next: stretches of one long cycle of words."""
    draw = random.Random(0)
    cycle = ["".join(draw.choices("abcdefghiklmnop", k=4)) for _ in range(24)]
    for split, documents in (("train", 200), ("validation", 8)):
        starts = [draw.randrange(len(cycle)) for _ in range(documents)]
        lines = [" ".join(cycle[(start + i) % len(cycle)] for i in range(48)) for start in starts]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")


def evaluation(path, model_dir):
    return loop.train(config.load(path), str(model_dir), runs.Lines())


@pytest.mark.full
@pytest.mark.parametrize("kind", ["masked_lm", "causal_lm"])
def test_flash_learns_a_text_in_which_each_word_follows_from_the_one_before(tmp_path, kind):
    recite(tmp_path)
    path = runs.write(
        tmp_path,
        model={"type": kind, "width": 32, "vocabulary_size": 40},
        optimizer={"learning_rate": 0.01, "warmup_steps": 10, "clip": {"scope": "global", "norm": 1.0}},
        train={"steps": 300, "tokens_per_step": 16 * runs.LENGTH, "steps_per_loop": 100, "checkpoint_every": 1000},
        evaluation={"every": None},
    )
    result = runs.in_child(evaluation, path, tmp_path / "model")
    assert result["unigram_perplexity"] > 10
    assert result["perplexity"] < result["unigram_perplexity"] / 4
