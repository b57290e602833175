"""Every config of the package starts: its source is read, its tokenizer is made, and a step is trained."""

import dataclasses
import shutil

import pytest

from flash_tf import config
from flash_tf.data import tokenizers
from flash_tf.training import loop
from tests.contracts.test_configs import SMALL, shrunk
from tests.training import made_text, runs

WORDS = 268_000  # more than the vocabulary of WikiText-103
KEPT = {name: size for name, size in SMALL.items() if name != "vocabulary_size"}


def kind_of(name):
    """What a config needs to start, beside its size."""
    data = config.load(name).data
    tokenizer = "file" if isinstance(data.tokenizer, str) else data.tokenizer
    return data.source["type"], tokenizer, data.whitespace


def representatives():
    """The first config of each kind."""
    return list({kind_of(name): name for name in reversed(config.names())}.values())


@pytest.fixture(scope="module")
def shared():
    """The tokenizers made so far, by kind and size."""
    made, train = {}, tokenizers.train

    def once(documents, *options):
        if options not in made:
            made[options] = train(documents, *options)
        return made[options]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "train", once)
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text with as many words as the largest vocabulary."""
    folder = tmp_path_factory.mktemp("texts")
    made_text.write(folder, WORDS)
    made_text.write_vocabulary(folder, 32_000)
    return folder


def start(name, folder, monkeypatch, sizes, *overrides):
    """Trains the first step of a config in `folder`, as `flash-tf train` would; the last evaluation."""
    monkeypatch.chdir(folder)
    tfds = ["data.source.data_dir=tfds"] if config.load(name).data.source["type"] == "tfds" else []
    small = shrunk(name, sizes, "train.steps=1", "train.jit_compile=false", "evaluation.windows=2", *tfds, *overrides)
    small = dataclasses.replace(small, data=dataclasses.replace(small.data, cache=str(folder / "tokens")))
    shutil.rmtree(folder / "run", ignore_errors=True)
    (folder / "run").mkdir()
    return small, loop.train(small, str(folder / "run"), runs.Lines())


@pytest.mark.full
@pytest.mark.parametrize("name", config.names())
def test_a_config_starts_with_its_tokenizer_source_and_vocabulary_as_shipped(name, folder, shared, monkeypatch):
    small, evaluation = start(name, folder, monkeypatch, KEPT)
    shipped = config.load(name)
    assert small.model["vocabulary_size"] == shipped.model["vocabulary_size"]
    assert small.data.tokenizer == shipped.data.tokenizer
    assert evaluation["step"] == 1
