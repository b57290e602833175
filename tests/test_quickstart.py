"""The quickstart as `make quickstart` runs it: what it learns within its budget, and what it fills in."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flash_tf.data.sources import SOURCES
from flash_tf.data.tokenizer import Tokenizer
from tests.training import runs

ROOT = Path(__file__).parents[1]
MASKED_CODE = "scripts/masked_code.txt"
FIRST = ["import", "self", "None", "range"]
CPU_SECONDS = 600  # five minutes on two cores


def unigram_perplexity(tokenizer):
    """The perplexity of the validation tokens under the training split's unigram shares."""
    source, counts = SOURCES.build({"type": "python_stdlib"}), {}
    for split in ("train", "validation"):
        texts = [text for shard in source.shards(split) for text in source.documents(split, shard)]
        counts[split] = np.bincount(np.concatenate(tokenizer.encode(texts)), minlength=tokenizer.vocabulary_size)
    shares = (counts["train"] + 1) / (counts["train"] + 1).sum()
    return np.exp(-(counts["validation"] * np.log(shares)).sum() / counts["validation"].sum())


def test_make_quickstart_asks_for_as_many_words_as_are_expected_of_it():
    assert MASKED_CODE in (ROOT / "Makefile").read_text()
    assert (ROOT / MASKED_CODE).read_text().count("<mask>") == len(FIRST)


@pytest.mark.full
@pytest.mark.one_backend
def test_the_quickstart_beats_the_unigram_twentyfold_and_puts_the_right_words_first(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = [sys.executable, "-c", "from flash_tf.cli import program; program()"]  # whose CPU time is ours to ask for
    subprocess.run([*program, "train", "quickstart", "--model-dir", tmp_path / "run"], check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime < CPU_SECONDS
    _, out, _ = runs.command(tmp_path, "evaluate", tmp_path / "run", "--json")
    tokenizer = Tokenizer.load(str(tmp_path / "run/tokenizer.model"))
    assert json.loads(out)["perplexity"] * 20 <= unigram_perplexity(tokenizer)
    text = (ROOT / MASKED_CODE).read_text()
    _, out, _ = runs.command(tmp_path, "fill-mask", tmp_path / "run", text, "--json")
    assert [mask[0]["token"].lstrip("▁") for mask in json.loads(out)["masks"]] == FIRST
