"""Every config of a task takes a step on a small dataset with the features of the real one."""

import json
import random

import numpy as np
import pytest
import tensorflow_datasets as tfds

from flash_tf import config
from flash_tf.data.sources import SOURCES
from flash_tf.training import loop, preflight
from flash_tf.training.tasks import TASKS
from tests.contracts.test_configs import SMALL, shrunk
from tests.data.test_example_sources import TEXT, store
from tests.data.test_long_range_sources import release
from tests.training import runs

pytestmark = pytest.mark.full
CLASS, INTEGER = {2: tfds.features.ClassLabel(num_classes=2), 3: tfds.features.ClassLabel(num_classes=3)}, np.int32
TWO = {"sentence1": TEXT, "sentence2": TEXT}
GLUE = {
    "cola": {"sentence": TEXT, "label": CLASS[2]},
    "sst2": {"sentence": TEXT, "label": CLASS[2]},
    "mrpc": {**TWO, "label": CLASS[2]},
    "stsb": {**TWO, "label": np.float32},
    "qqp": {"question1": TEXT, "question2": TEXT, "label": CLASS[2]},
    "mnli": {"premise": TEXT, "hypothesis": TEXT, "label": CLASS[3]},
    "qnli": {"question": TEXT, "sentence": TEXT, "label": CLASS[2]},
    "rte": {**TWO, "label": CLASS[2]},
    "wnli": {**TWO, "label": CLASS[2]},
}
SEQUENCE = tfds.features.Sequence
QUESTIONS = {
    "squad/v1.1:3.0.0": {
        "id": TEXT,
        "title": TEXT,
        "context": TEXT,
        "question": TEXT,
        "answers": SEQUENCE({"text": TEXT, "answer_start": INTEGER}),
    },
    "trivia_qa/rc.wikipedia:1.1.0": {
        "question": TEXT,
        "question_id": TEXT,
        "question_source": TEXT,
        "entity_pages": SEQUENCE({"doc_source": TEXT, "filename": TEXT, "title": TEXT, "wiki_context": TEXT}),
        "answer": {"aliases": SEQUENCE(TEXT), "normalized_aliases": SEQUENCE(TEXT), "type": TEXT, "value": TEXT},
    },
}
IMAGE = tfds.features.Image(shape=(32, 32, 3))
ARENA = {
    "imdb_reviews/plain_text:1.0.0": {"text": TEXT, "label": CLASS[2]},
    "cifar10:3.0.2": {"id": TEXT, "image": IMAGE, "label": tfds.features.ClassLabel(num_classes=10)},
}
TASK_CONFIGS = [name for name in config.names() if config.load(name).model["type"] in TASKS]


def text(draw, words=30):
    return " ".join("".join(draw.choices("abcdefgh", k=draw.randint(1, 5))) for _ in range(words))


def filled(feature, draw):
    """A made-up value of a feature."""
    if isinstance(feature, dict):
        return {name: filled(one, draw) for name, one in feature.items()}
    if isinstance(feature, SEQUENCE):
        inner = feature.feature
        if isinstance(inner, tfds.features.FeaturesDict):
            return {name: [filled(one, draw) for _ in range(2)] for name, one in inner.items()}
        return [text(draw, 1) for _ in range(2)]
    if feature is IMAGE:
        return np.frombuffer(draw.randbytes(32 * 32 * 3), "uint8").reshape(32, 32, 3)
    if isinstance(feature, tfds.features.ClassLabel) or feature in (np.float32, INTEGER):
        return draw.randrange(2)
    return text(draw)


def example(name, features, draw):
    made = filled(features, draw)
    if name.startswith("squad"):
        made["answers"] = {"text": [made["context"].split()[0]], "answer_start": [0]}
    if name.startswith("trivia"):
        made["answer"]["aliases"] = [text(draw, 9), made["entity_pages"]["wiki_context"][1].split()[3]]
    return made


def of_tfds(folder, source, draw):
    """Writes the dataset that a config names. Returns the option that finds it."""
    name, _, task = source["name"].partition("/")
    stored = {f"glue/{task}:2.0.0": {**GLUE[task], "idx": INTEGER}} if name == "glue" else {**QUESTIONS, **ARENA}
    ((full, features),) = ((full, found) for full, found in stored.items() if full.startswith(source["name"]))
    rows = [example(full, features, draw) for _ in range(12)]
    store(folder, full, features, train=rows, **{source.get("validation_split", "validation"): rows[:5]})
    return f"data.source.data_dir={folder}"


def of_words(folder, source, draw):
    """The options of a source that has words of its own, with little to read."""
    if source["type"] == "pathfinder_files":
        release(folder)
        return f"data.source.data_dir={folder}"
    if source["type"] == "list_ops_files":
        (folder / "list_ops.tsv").write_text("Source\tTarget\n" + "( ( [MAX 2 ) 9 ) ]\t9\n" * 12)
        return f"data.source={{type: list_ops_files, train: {folder}/*.tsv, validation: {folder}/*.tsv}}"
    return f"data.source={ {**source, 'size': 16, 'train': 4, 'validation': 2} }"


def of_table(folder, source, draw):
    """The option that finds a table with the config's keys."""
    row = lambda i: [f"{i % 2}.0", "a", "b", text(draw), text(draw)]  # noqa: E731
    (folder / "pairs.tsv").write_text("".join("\t".join(row(i)) + "\n" for i in range(12)))
    return f"data.source={ {**source, 'train': f'{folder}/*.tsv', 'validation': f'{folder}/*.tsv'} }"


def of_files(folder, loaded, draw):
    rows = [{"text": text(draw), "text_b": text(draw), "label": i % 2} for i in range(12)]
    if loaded.data.labels:
        rows = [{**row, "label": loaded.data.labels[row["label"]]} for row in rows]
    suffix, lines = ".jsonl", "".join(json.dumps(row) + "\n" for row in rows)
    if loaded.model["type"] == "span":
        answers = [[{"text": row["text"].split()[0], "answer_start": 0}] for row in rows]
        asked = [{"id": str(i), "question": text(draw, 5), "answers": one} for i, one in enumerate(answers)]
        paragraphs = [{"context": row["text"], "qas": [one]} for row, one in zip(rows, asked, strict=True)]
        suffix, lines = ".json", json.dumps({"data": [{"title": "x", "paragraphs": paragraphs}]})
    path = folder / f"examples{suffix}"
    path.write_text(lines)
    return f"data.source={{type: example_files, train: {path}, validation: {path}}}"


def examples(name, folder):
    """Writes little data with the features of a config's own. Returns the option that finds it."""
    loaded, draw = config.load(name), random.Random(0)
    source = loaded.data.source
    if hasattr(SOURCES.get(source["type"]), "words"):
        return of_words(folder, source, draw)
    if source["type"] == "tfds":
        return of_tfds(folder, source, draw)
    return of_table(folder, source, draw) if "keys" in source else of_files(folder, loaded, draw)


@pytest.mark.parametrize("name", TASK_CONFIGS)
def test_the_config_of_a_task_takes_a_step_on_examples_with_the_real_features(name, tmp_path):
    loaded, found = config.load(name), examples(name, tmp_path)
    steps = ("train.steps=1", "optimizer.warmup_steps=0", "evaluation.every=null", "train.precision=float32")
    size = 300 if loaded.data.whitespace == "keep" else 60  # with a piece for each byte
    sizes = {**SMALL, "vocabulary_size": size if loaded.model["vocabulary_size"] > 300 else None}
    kept = {key: value for key, value in sizes.items() if value is not None}
    small = shrunk(name, kept, found, "model.remat=false", *steps, "train.jit_compile=false")
    evaluation = loop.train(small, str(tmp_path / "run"), runs.Lines())
    assert np.isfinite(evaluation["loss"]) and small.evaluation.metric in evaluation


def test_a_word_that_list_ops_lacks_is_refused_before_any_work(tmp_path):
    (tmp_path / "bad.tsv").write_text("Source\tTarget\n( ( [MAX 2 ) 9 ) ]\t12\n")
    source = f"data.source={{type: list_ops_files, train: {tmp_path}/bad.tsv, validation: {tmp_path}/bad.tsv}}"
    loaded = config.load("long_range/arena_list_ops_flash", [source])
    with pytest.raises(ValueError, match="bad.tsv, line 2 needs the words of ListOps, got '12'"):
        preflight.check(loaded)


def test_a_fused_loss_is_refused_for_a_model_without_the_head_of_a_language_model(tmp_path):
    found = examples("long_range/arena_list_ops_flash", tmp_path)
    loaded = config.load("long_range/arena_list_ops_flash", [found, "train.loss_implementation=pallas"])
    with pytest.raises(ValueError, match="'pallas' needs a language model, got model.type classifier"):
        preflight.check(loaded)
