"""The tokens of a split as one array, by the command as its user runs it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import write_tokens
from flash_tf.data.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["the cat sat on the mat", "a dog ate the log", "the dog sat on the cat"] * 20


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("".join(f"{text}\n" for text in DOCUMENTS))
    tokenizer = Tokenizer.train(iter(DOCUMENTS), 22)
    tokenizer.save(str(folder / "tokenizer.model"))
    (folder / "mine.yaml").write_text(
        "base: quickstart\n"
        "model: {vocabulary_size: 22}\n"
        "data:\n"
        f"  source: {{type: text_files, documents: line, train: {folder}/text.txt, validation: {folder}/text.txt}}\n"
        f"  tokenizer: {folder}/tokenizer.model\n"
    )
    return folder, tokenizer


@pytest.mark.full
def test_the_file_has_each_documents_tokens_and_an_eos_and_the_terminal_what_was_done(data):
    folder, tokenizer = data
    command = [sys.executable, "-m", "benchmarks.write_tokens", f"{folder}/mine.yaml", "train", f"{folder}/new/tokens"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    want = np.concatenate([[*ids, tokenizer.eos_id] for ids in tokenizer.encode(DOCUMENTS)])
    np.testing.assert_array_equal(np.load(folder / "new/tokens"), want)
    assert (done.returncode, done.stdout) == (0, f"{folder}/new/tokens: {len(want):,} tokens of uint16\n")
    said = [f"tokenising the train split of {folder}/mine.yaml", "tokenised 1 of 1 train shards"]
    assert done.stderr.splitlines() == said


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("data.tokenizer=null", "has no data.tokenizer, which the tokens need"),
        ("model.vocabulary_size=23", "model.vocabulary_size is 23, but the tokenizer"),
    ],
)
def test_bad_input_is_refused(data, option, said):
    folder, _ = data
    with pytest.raises(ValueError, match=said):
        write_tokens.main([f"{folder}/mine.yaml", "train", f"{folder}/never.npy", "--set", option])
    assert not (folder / "never.npy").exists()
