"""Every config of the package starts: its source is read, its tokenizer is made, and a step is trained."""

import shutil

import pytest

from flash_tf import config
from flash_tf.data import stream, tokenizers
from flash_tf.data.packing import Packing
from flash_tf.data.sources import SOURCES
from flash_tf.training import inputs, loop
from flash_tf.training.tasks import TaskObjective, objective_of
from tests.contracts.test_configs import SMALL, shrunk
from tests.training import made_text, runs
from tests.training.test_task_configs import TASK_CONFIGS, examples

SMALL_VOCABULARY = 1_200
WORDS = 268_000  # more than the vocabulary of WikiText-103
# Configs of tasks read labelled examples. Those with text of a large vocabulary start from a masked model, as they say.
NAMES = [name for name in config.names() if not issubclass(objective_of(config.load(name)), TaskObjective)]
MASKED = {
    "film_reviews": "wikitext2_mlm/flash",
    "glue": "wikitext103_mlm/transnormer_t2",
    "questions": "mlm_c4/flash_s512",
}
KEPT = {name: size for name, size in SMALL.items() if name != "vocabulary_size"}


def kind_of(name):
    """What a config needs to start, beside its size."""
    data = config.load(name).data
    tokenizer = "file" if isinstance(data.tokenizer, str) else data.tokenizer
    return data.source["type"], tokenizer, data.whitespace


def representatives():
    """The first config of each kind, but quickstart, which `tests/test_quickstart.py` trains."""
    return list({kind_of(name): name for name in reversed(NAMES) if name != "quickstart"}.values())


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


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory):
    """A little of the same text."""
    folder = tmp_path_factory.mktemp("little")
    made_text.write(folder, 3_000)
    made_text.write_vocabulary(folder, SMALL_VOCABULARY)
    return folder


def shrunk_in(name, folder, sizes, *overrides):
    """The config at small size, to run in `folder`."""
    tfds = ["data.source.data_dir=tfds"] if config.load(name).data.source["type"] == "tfds" else []
    return shrunk(name, sizes, f"data.cache={folder / 'tokens'}", *tfds, *overrides)


@pytest.mark.parametrize("name", representatives())
def test_each_kind_of_config_reads_its_source_with_its_kind_of_tokenizer(name, small_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(small_folder)
    small = shrunk_in(name, small_folder, {**SMALL, "vocabulary_size": SMALL_VOCABULARY})
    tokenizer = inputs.make_tokenizer(small, str(tmp_path), chief=True, report=lambda line: None)
    assert tokenizer.vocabulary_size == SMALL_VOCABULARY
    assert [path.name for path in tmp_path.iterdir()] == [tokenizer.file]
    cache = inputs.make_cache(small, str(tmp_path), tokenizer, "validation", lambda *progress: None)
    packing = Packing(kind="concatenate", sequence_length=64, overlap=0, align=1)
    batches = stream.EvaluationBatches(cache, packing, batch_size=2, windows=2)
    (batch,) = batches
    tokens = batch["tokens"]
    assert tokens.shape == (2, 64)
    assert 0 <= tokens.min() <= tokens.max() < SMALL_VOCABULARY
    text = next(SOURCES.build(small.data.source).documents("validation", cache.shards[0]))
    found = tokenizer.decode(tokens[0][tokens[0] != tokenizer.eos_id])
    known = [word for word in found.split()[:-1] if word not in ("<unk>", "⁇")]
    assert len(known) > 10 or kind_of(name)[1] == config.TokenizerConfig(train="word")
    assert set(known) <= set(text.split())


def start(name, folder, monkeypatch, sizes, *overrides):
    """Trains the first step of a config in `folder`, as `flash-tf train` would; the last evaluation."""
    monkeypatch.chdir(folder)
    overrides = ("train.steps=1", "train.jit_compile=false", "evaluation.windows=2", *overrides)
    small = shrunk_in(name, folder, sizes, *overrides)
    shutil.rmtree(folder / "run", ignore_errors=True)
    (folder / "run").mkdir()
    return small, loop.train(small, str(folder / "run"), runs.Lines())


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_config_starts_with_its_tokenizer_source_and_vocabulary_as_shipped(name, folder, shared, monkeypatch):
    small, evaluation = start(name, folder, monkeypatch, KEPT)
    shipped = config.load(name)
    assert small.model["vocabulary_size"] == shipped.model["vocabulary_size"]
    assert small.data.tokenizer == shipped.data.tokenizer
    assert evaluation["step"] == 1


@pytest.fixture(scope="module")
def masked(folder, shared):
    """The run of the masked model that a config of a task starts from, trained for a step with its vocabulary."""
    runs_of = {}

    def run(name, patch):
        source = MASKED[name.partition("/")[0]]
        if source not in runs_of:
            start(source, folder, patch, KEPT)
            runs_of[source] = (folder / "run").rename(folder / source.replace("/", "-"))
        return runs_of[source]

    return run


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in TASK_CONFIGS if name.partition("/")[0] in MASKED])
def test_a_config_of_a_task_starts_from_a_masked_model_with_its_vocabulary(name, masked, tmp_path, monkeypatch):
    begin = masked(name, monkeypatch)
    steps = ("train.steps=1", "optimizer.warmup_steps=0", "evaluation.every=null", "train.precision=float32")
    small = shrunk(name, KEPT, examples(name, tmp_path), f"init_from={begin}", *steps, "train.jit_compile=false")
    lines = runs.Lines()
    evaluation = loop.train(small, str(tmp_path / "run"), lines)
    shipped = config.load(name)
    assert small.model["vocabulary_size"] == shipped.model["vocabulary_size"] >= 8_000
    assert small.data.tokenizer == shipped.data.tokenizer and small.evaluation.metric in evaluation
    assert str(begin) in lines.shown()
