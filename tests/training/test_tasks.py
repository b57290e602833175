"""Tasks: labelled examples in, a head of their own, metrics and predictions out."""

import argparse
import json
import math
import random
import types
from pathlib import Path

import numpy as np
import pytest
import yaml

from flash_tf import config
from flash_tf.commands import predict as command
from flash_tf.data.encoders import NumberLabel
from flash_tf.data.rows import placed
from flash_tf.data.sources.example_files import ExampleFiles
from flash_tf.training import loop, modelling, run_directory
from flash_tf.training.predict import predict
from flash_tf.training.restore import restore
from flash_tf.training.run import DivergedError
from flash_tf.training.sweep import _best_of, as_text, sweep
from tests.training import runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A masked model of two steps in `mlm`, and examples whose words say their class."""
    folder = tmp_path_factory.mktemp("tasks")
    runs.corpus(folder)
    runs.train(runs.write(folder, model=runs.SMALLEST, train={"steps": 2}, evaluation={"every": None}), folder / "mlm")
    words, draw = sorted(set((folder / "train.txt").read_text().split())), random.Random(1)
    some = lambda label, k: " ".join(draw.choices(words[:20] if label else words[-20:], k=k))  # noqa: E731
    for split, count in (("train", 160), ("validation", 41)):
        with open(folder / f"{split}.jsonl", "w") as file:
            for i in range(count):
                a, b = draw.randint(0, 1), draw.randint(0, 1)
                texts = {"text": some(a, draw.randint(2, 30)), "other": some(b, 4)}
                more = {"prompt": f"{texts['other']} {words[2 if a else 3]}", "answer": words[a]}
                file.write(
                    json.dumps({**texts, **more, "id": i, "polarity": ["bad", "good"][a], "stars": 2.5 * a}) + "\n"
                )
    return folder


def write(folder, kind, name="task", **sections):
    """A config of a task on the folder's examples, which starts from the masked model. Returns its path."""
    values = yaml.safe_load(
        Path(runs.write(folder, data={"columns": {"text": "text", "label": "polarity"}})).read_text()
    )
    values["model"] |= {**runs.SMALLEST, "type": kind, "position_embedding": "scaled_sin"}
    values["data"]["source"] = {"type": "example_files"}
    values["data"]["source"] |= {split: str(folder / f"{split}.jsonl") for split in ("train", "validation")}
    values |= {"init_from": str(folder / "mlm"), "evaluation": {"every": 10}}
    values["train"] |= {"steps": 20, "checkpoint_every": 5}
    for section, options in sections.items():
        values[section] |= options
    path = Path(folder, f"{name}.yaml")
    path.write_text(yaml.safe_dump(values))
    return str(path)


CLASSES = {"model": {"classes": 2}, "data": {"labels": ["bad", "good"]}}


def records(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def pairs(folder):
    """A classifier of pairs. The first text says the class."""
    data = {**CLASSES["data"], "columns": {"text": "text", "text_b": "other", "label": "polarity"}}
    return write(folder, "classifier", model=CLASSES["model"], data=data)


def test_a_classifier_starts_from_a_masked_model_learns_and_predicts_what_its_evaluation_counts(folder, tmp_path):
    sizes = ("train.tokens_per_step=512", "train.steps=50", "train.checkpoint_every=50")
    shown = runs.train(pairs(folder), tmp_path, *sizes, "evaluation.every=null")
    heads = "not loaded: inner/kernel, inner/bias, outer/kernel, outer/bias; left behind: output_bias"
    assert heads in shown and "training a tokenizer" not in shown
    found = loop.evaluate(str(tmp_path), runs.Lines())
    assert found["labels"] == 41 and found["accuracy"] > 0.8
    file = str(folder / "validation.jsonl")
    predictions = list(predict(restore(str(tmp_path)), placed(ExampleFiles(file, file), "validation", file)))
    right = [one["label"] == example["polarity"] for one, example in zip(predictions, records(file), strict=True)]
    assert np.mean(right) == found["accuracy"]
    assert all(sum(one["probabilities"]) == pytest.approx(1, abs=1e-5) for one in predictions)


@pytest.mark.full
def test_a_task_that_was_stopped_goes_on_to_the_bit(folder, tmp_path):
    runs.train(pairs(folder), tmp_path / "run", stop_after=7)
    runs.train(pairs(folder), tmp_path / "run")
    runs.train(pairs(folder), tmp_path / "whole")
    runs.same(tmp_path / "run", tmp_path / "whole")


BAD = {
    "label": (
        {"polarity": "fine"},
        r"train.jsonl, example 161: label must be one of bad, good, or .* 0 to 1, got 'fine'",
    ),
    "number": ({"polarity": 2}, r"train.jsonl, example 161: label must be one of .* from 0 to 1, got 2"),
    "truth": ({"polarity": True}, r"train.jsonl, example 161: label must be one of .* from 0 to 1, got True"),
    "text": ({"text": 5}, r"train.jsonl, example 161: text must be a string, got 5"),
    "key": ({"polarity": ...}, r"train.jsonl, example 161 has no key 'polarity' for label; its keys are: text, other"),
}


full = lambda *values: pytest.param(*values, marks=pytest.mark.full)  # noqa: E731


@pytest.mark.parametrize("what", ["label", "key", full("number"), full("truth"), full("text")])
def test_an_example_that_cannot_be_used_is_named_before_the_first_step(folder, tmp_path, what):
    change, said = BAD[what]
    text = (folder / "train.jsonl").read_text()
    last = {**json.loads(text.splitlines()[-1]), **change}
    last = json.dumps({name: value for name, value in last.items() if value is not ...})
    (tmp_path / "train.jsonl").write_text(f"{text}{last}\n")
    files = {split: str(place / f"{split}.jsonl") for split, place in (("train", tmp_path), ("validation", folder))}
    path = write(
        folder, "classifier", **{**CLASSES, "data": {**CLASSES["data"], "source": {"type": "example_files", **files}}}
    )
    with pytest.raises(ValueError, match=said) as error:
        runs.train(path, tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("validation", "said"),
    [("empty.jsonl", "the validation split has no example"), ([], "the validation split of data.source has no file")],
)
def test_a_split_without_an_example_is_named_before_the_first_step(folder, tmp_path, validation, said):
    (tmp_path / "empty.jsonl").write_text("")
    validation = [str(tmp_path / name) for name in [validation] if isinstance(name, str)]
    source = {"type": "example_files", "train": str(folder / "train.jsonl"), "validation": validation}
    path = write(folder, "classifier", **{**CLASSES, "data": {**CLASSES["data"], "source": source}})
    with pytest.raises(ValueError, match=said):
        runs.train(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("label", [1e300, math.nan, "much"])
def test_a_number_that_float32_does_not_hold_is_no_label(label):
    read = lambda value: NumberLabel().read(("file, example 1",), value)  # noqa: E731
    assert read(-3.0e38) == -3.0e38
    with pytest.raises(ValueError, match=r"^file, example 1: label must be a finite number of float32, got "):
        read(label)


@pytest.mark.parametrize("kind", ["classifier", "matcher", "regressor"])
def test_learned_positions_that_a_task_has_by_default_reach_as_far_as_its_rows(folder, kind):
    classes = {} if kind == "regressor" else {"model.classes": 2}
    loaded = config.load(write(folder, kind, f"{kind}-default"), [f"{k}={v}" for k, v in classes.items()])
    loaded.model.pop("position_embedding")
    assert modelling.model_extras(loaded) == {"max_length": loaded.data.sequence_length}


def test_options_that_do_not_fit_a_task_are_refused_before_any_work(folder, tmp_path):
    path = write(folder, "classifier", **CLASSES)
    refused = {
        "model.classes=3": r"data.labels must name the 3 classes of model.classes, got 2 names",
        "model.width=32": r"a Classifier cannot start from this MaskedLM: .* needs shape \(100, 32\), got \(100, 16\)",
        "data.source={type: python_stdlib}": r"classifier reads labelled examples: it needs one of .*example_files",
        "data.columns={txt: text}": r"data.columns needs keys, as strings, for text, text_b, label, got txt: 'text'",
        "data.packing=documents": r"data.packing is for documents, and this model reads none",
        "model.type=regressor": r"has no option 'classes'",
        "data.answerless_rows=1.5": r"data.answerless_rows must be from 0 to 1, got 1.5",
        "data.answerless_rows=0.5": r"data.answerless_rows is for questions, and this model reads none",
        "evaluation.metric=pearson": r"evaluation.metric must be one of loss, accuracy, f1, matthews, got 'pearson'",
    }
    for option, said in refused.items():
        with pytest.raises(ValueError, match=said):
            runs.train(path, tmp_path / "run", option, "train.tokens_per_step=128")
    span = write(folder, "span", name="refused")
    for value, more, said in (
        (".nan", (), "must be a finite number of at most 3.4e.38, got nan"),
        ("high", (), "must be float, got 'high'"),
        ("1", ("model.no_answer=false",), "must be 0 with no_answer: false, got 1"),
    ):
        with pytest.raises(ValueError, match=f"no_answer_threshold {said}"):
            runs.train(span, tmp_path / "run", "data.columns=null", f"model.no_answer_threshold={value}", *more)
    masked = write(folder, "masked_lm")
    documents = {"type": "text_files", **{split: str(folder / f"{split}.txt") for split in ("train", "validation")}}
    with pytest.raises(ValueError, match=r"data.columns is for labelled examples, and this model reads none"):
        runs.train(masked, tmp_path / "run", f"data.source={json.dumps(documents)}")
    with pytest.raises(ValueError, match=r"model.type masked_lm reads documents: it needs one of the sources"):
        runs.train(masked, tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()


def test_predict_needs_a_task_and_the_command_writes_no_file_that_is_not_its_own(folder, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("mine")
    file = folder / "validation.jsonl"
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args([str(folder / "mlm"), str(file), "--out", str(tmp_path / "mine.txt")])
    with pytest.raises(ValueError, match="holds mine.txt, which flash-tf predict did not write"):
        command.run(args, types.SimpleNamespace(progress=runs.Lines))
    monkeypatch.setattr("flash_tf.training.predict.predict", lambda *given: [{"answer": "\ud800"}])
    args.out = str(tmp_path / "own.jsonl")
    command.run(args, types.SimpleNamespace(progress=runs.Lines))
    assert json.loads((tmp_path / "own.jsonl").read_text()) == {"answer": "\ud800"}
    with pytest.raises(ValueError, match="predict needs the run of a task, as a classifier's, got a masked_lm"):
        list(predict(restore(str(folder / "mlm")), []))


def questions(folder):
    """Files of questions whose answer is the word after the one that they ask for, in texts longer than a row."""
    words, draw = sorted(set((folder / "train.txt").read_text().split())), random.Random(2)
    for split, count in (("train", 30), ("validation", 9)):
        with open(folder / f"{split}-questions.jsonl", "w") as file:
            for i in range(count):
                text = draw.sample(words, 40)
                at = draw.randrange(39)
                start = sum(len(word) + 1 for word in text[: at + 1])
                answers = {"text": [text[at + 1]], "answer_start": [start]}
                if i % 3 == 0:
                    answers = ["not there"] if i == 0 else {"text": [], "answer_start": []}
                record = {"question": text[at] if i % 3 else "x", "context": " ".join(text), "answers": answers}
                file.write(json.dumps(record) + "\n")
    return {split: str(folder / f"{split}-questions.jsonl") for split in ("train", "validation")}


def test_questions_over_long_texts_are_trained_scored_and_answered_with_words_of_the_text(folder, tmp_path):
    files = questions(folder)
    data = {"columns": None, "source": {"type": "example_files", **files}}
    path = write(folder, "span", name="span", data=data)
    shown = runs.train(path, tmp_path, "train.steps=4", "evaluation.every=null")
    assert "not loaded: span/kernel, span/bias; left behind: output_bias" in shown
    found = loop.evaluate(str(tmp_path), runs.Lines())
    assert found["questions"] == 9 and 0 <= found["exact_match"] <= found["f1"] <= 1
    examples = [(str(i), one) for i, one in enumerate(records(files["validation"]))]
    trained = restore(str(tmp_path))
    answers = list(predict(trained, examples))
    assert len(answers) == 9 and " train rows without a label" in shown
    assert all(one["answer"] in example["context"] for one, (_, example) in zip(answers, examples, strict=True))
    wanted = [one["answers"] for _, one in examples]
    wanted = [one if isinstance(one, list) else one["text"] or [""] for one in wanted]
    exact = [one["answer"] == texts[0] for one, texts in zip(answers, wanted, strict=True)]
    assert np.mean(exact) == pytest.approx(found["exact_match"])
    spans = [one["best_span"] == texts[0] for one, texts in zip(answers, wanted, strict=True) if texts != [""]]
    assert np.mean(spans) == pytest.approx(found["has_answer_exact_match"])
    assert found["no_answer_share"] == pytest.approx(1 - len(spans) / 9)
    threshold = found["best_f1_threshold"]
    run = str(tmp_path)
    best = loop.evaluate(run, runs.Lines(), overrides=[f"model.no_answer_threshold={threshold!r}"])
    assert best["f1"] == pytest.approx(found["best_f1"]) == pytest.approx(best["best_f1"])
    same = [f"model.no_answer_threshold={threshold!r}", "train.steps=4", "evaluation.every=null"]
    run_directory.claim(run, config.load(path, same))
    with pytest.raises(ValueError, match="holds a run with model.no_answer = None, this one has False"):
        run_directory.claim(run, config.load(path, [*same[1:], "model.no_answer=false"]))
    lines = Path(files["validation"]).read_bytes().splitlines(keepends=True)
    Path(files["validation"]).write_bytes(b"".join(lines[::-1]))  # of the same size
    with pytest.raises(ValueError, match="holds a run with checksums.validation.*validation-questions.jsonl = "):
        run_directory.claim(run, config.load(path, same))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "model", "columns", "metric"),
    [
        ("matcher", {"classes": 2}, {"text": "text", "text_b": "other", "label": "polarity"}, "accuracy"),
        ("regressor", {}, {"text": "text", "label": "stars"}, "pearson"),
        ("causal_lm", {}, {"prompt": "prompt", "answer": "answer"}, "exact_match"),
    ],
)
def test_every_task_learns_what_its_examples_show(folder, tmp_path, kind, model, columns, metric):
    data = {"columns": columns, "labels": ["bad", "good"] if kind == "matcher" else None}
    path = write(folder, kind, name=kind, model=model, data=data)
    steps = ("train.steps=150", "train.tokens_per_step=512", "evaluation.every=null", "optimizer.learning_rate=0.02")
    runs.train(path, tmp_path, *steps)
    assert loop.evaluate(str(tmp_path), runs.Lines())[metric] > 0.7
    if kind == "causal_lm":
        trained, examples = restore(str(tmp_path)), records(folder / "validation.jsonl")
        asked = [("here", {"prompt": one["prompt"]}) for one in examples]
        answers = predict(trained, asked)
        right = [got["answer"] == one["answer"] for got, one in zip(answers, examples, strict=True)]
        assert np.mean(right) > 0.7
        with pytest.raises(
            ValueError, match="answers need --max-new-tokens from 1 to 31, below a row's length, got 32"
        ):
            list(predict(trained, asked, new_tokens=32))


@pytest.mark.full
def test_a_sweep_trains_a_run_for_each_value_and_names_the_best(folder, tmp_path):
    path = write(folder, "classifier", **CLASSES)
    overrides = ["optimizer.learning_rate=1.0e-9,0.02", "train.steps=30", "optimizer.betas=[0.9, 0.98]"]
    found = sweep(path, [*overrides, "evaluation.every=15", "evaluation.metric=accuracy"], str(tmp_path), runs.Lines())
    assert [row["optimizer.learning_rate"] for row in found["runs"]] == ["1.0e-9", "0.02"]
    assert found["best"]["optimizer.learning_rate"] == "0.02" and found["metric"] == "accuracy"
    best = Path(found["best"]["model_dir"])
    assert found["best"]["accuracy"] == max(one["accuracy"] for one in runs.records(best, "evaluations.jsonl"))
    assert as_text(found).splitlines()[2].endswith("<- best")
    with pytest.raises(ValueError, match="sweep needs a --set with values to choose from"):
        sweep(path, ["train.steps=30"], str(tmp_path), runs.Lines())


def test_a_figure_that_is_no_number_is_no_best_one():
    found = [{"loss": loss, "f1": -loss} for loss in (math.nan, 2.0, 1.0)]
    assert _best_of(found, "loss")["loss"] == _best_of(found, "f1")["loss"] == 1.0


def test_a_sweep_goes_on_after_a_run_that_diverges(folder, tmp_path, monkeypatch):
    def train(experiment, model_dir, progress, begins):
        begins()
        if experiment.optimizer.learning_rate > 1:
            raise DivergedError("the loss is not a number at step 2")
        Path(model_dir).mkdir()
        Path(model_dir, "evaluations.jsonl").write_text('{"step": 20, "loss": 0.5}\n')

    monkeypatch.setattr(loop, "train", train)
    path, lines = write(folder, "classifier", **CLASSES), runs.Lines()
    began = []
    twice = ["optimizer.learning_rate=1.0e+9,0.02,0.02"]  # the second is the same run
    found = sweep(path, twice, str(tmp_path), lines, began.append)
    assert began == [f"{tmp_path}/optimizer.learning_rate={rate}" for rate in ("1.0e+9", "0.02")]
    assert found["runs"][0]["diverged"] == "the loss is not a number at step 2"
    assert found["best"] == found["runs"][1] and found["best"]["loss"] == 0.5
    assert [line.split()[-1] for line in as_text(found).splitlines()] == ["loss", "diverged", "best"]
    assert json.loads(json.dumps(found)) == found
    with pytest.raises(ValueError, match="all 2 runs of the sweep diverged, the last one so: the loss is not a number"):
        sweep(path, ["optimizer.learning_rate=1.0e+9,1.0e+8"], str(tmp_path), lines)
