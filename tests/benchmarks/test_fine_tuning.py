"""Fine-tuning: the splits of the data, the scores, and a whole run at a tiny size."""

import json

import pytest

from benchmarks import fine_tuning, fine_tuning_data, result_files
from benchmarks.fine_tuning import Case
from flash_tf import config
from flash_tf.data import example_formats
from tests.training import made_text

TINY = {
    "model.width": 32,
    "model.vocabulary_size": 1200,
    "train.steps": 2,
    "train.steps_per_loop": 1,
    "train.tokens_per_step": 1024,
    "train.precision": "float32",
    "optimizer.warmup_steps": 1,
}


@pytest.fixture
def reviews(tmp_path):
    folder = tmp_path / "reviews"
    for label in ("neg", "pos"):
        (folder / label).mkdir(parents=True)
        for fold in (0, 1, 799, 800, 899, 900, 999):
            (folder / label / f"cv{fold:03}_{fold + 7}.txt").write_text(f"a {label} text of {fold} \n" * 3)
    return folder


@pytest.fixture
def articles(tmp_path):
    """16 articles of two paragraphs with three questions each; the answers are the words w0 to w5."""

    def paragraph(article, first):
        words = [f"w{i}" for i in range(first, first + 3)]
        context = f"About {article}: {' '.join(words)} end."
        asked = [(f"{article}-{w}", f"which {w}?", [{"text": w, "answer_start": context.index(w)}]) for w in words]
        qas = [dict(zip(("id", "question", "answers"), one, strict=True)) for one in asked]
        return {"context": context, "qas": qas}

    data = [{"title": f"a{i}", "paragraphs": [paragraph(f"a{i}", first) for first in (0, 3)]} for i in range(16)]
    file = tmp_path / "squad.json"
    file.write_text(json.dumps({"data": data}))
    return file


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_reviews_are_split_by_fold(reviews, tmp_path):
    files = fine_tuning_data.film_reviews(str(reviews), tmp_path / "out")
    assert {split: len(lines(file)) for split, file in files.items()} == {"train": 6, "validation": 4, "test": 4}
    assert lines(files["test"])[-1] == {"text": "a pos text of 999 \n" * 3, "label": "pos"}
    (reviews / "pos/cv800_807.txt").unlink()
    (reviews / "pos/cv899_906.txt").unlink()
    with pytest.raises(
        ValueError, match=r"needs neg/cvNNN_\*.txt and pos/cvNNN_\*.txt of each split, got none for val"
    ):
        fine_tuning_data.film_reviews(str(reviews), tmp_path / "out")


def test_articles_are_documents_with_questions_of_others_that_have_no_answer(articles, tmp_path):
    files = fine_tuning_data.questions(str(articles), tmp_path / "out")
    titles = []
    for split, many in (("train", 12), ("validation", 2), ("test", 2)):
        found = list(example_formats.squad(str(files[split])))
        assert len(found) == many * (6 + 2)
        for one in found:
            own = one["context"].split(":")[0].removeprefix("About ")
            asked, _, kind = one["id"].partition("-")[2].partition("-")
            assert (one["id"].startswith(f"{own}-")) == (kind == "")
            assert one["answers"]["text"] == ([asked] if kind == "" else [])
            for text, start in zip(*one["answers"].values(), strict=True):
                assert one["context"][start : start + len(text)] == text
            titles.append(own)
    assert len({*titles}) == 16


def test_wrong_files_of_questions_are_named(articles, tmp_path):
    data = json.loads(articles.read_text())["data"]
    for found, message in (
        ({"data": data[:15]}, "needs at least 16 articles, got 15"),
        ({"articles": data}, "needs the layout of SQuAD's files, got KeyError: 'data'"),
    ):
        articles.write_text(json.dumps(found))
        with pytest.raises(ValueError, match=message):
            fine_tuning_data.questions(str(articles), tmp_path / "out")
    data[0]["paragraphs"][1]["qas"][0]["answers"][0]["answer_start"] += 1
    articles.write_text(json.dumps({"data": data}))
    with pytest.raises(ValueError, match="question a0-w3 needs 'w3' at [0-9]+ of its article"):
        fine_tuning_data.questions(str(articles), tmp_path / "out")


def test_scores_are_of_predictions_and_baselines_of_none(reviews, articles, tmp_path):
    test = fine_tuning_data.film_reviews(str(reviews), tmp_path / "out")["test"]
    assert fine_tuning.film_review_scores(test, None) == {"accuracy": 0.5}
    predictions = [{"label": "neg"}] * 3 + [{"label": "pos"}]
    assert fine_tuning.film_review_scores(test, predictions) == {"accuracy": 0.75}
    test = fine_tuning_data.questions(str(articles), tmp_path / "out")["test"]
    baseline = fine_tuning.question_scores(test, None)
    shares = dict.fromkeys(("exact_match", "f1", "best_exact_match", "best_f1", "no_answer_share"), 0.25)
    others = [f"{of}_{name}" for of in ("has_answer", "answered") for name in ("exact_match", "f1")]
    assert baseline == shares | dict.fromkeys(others, 0.0)
    texts = ["".join(one["answers"]["text"]) for one in example_formats.squad(str(test))]
    right = [{"answer": text, "best_span": text or "end.", "score": len(text) - 1} for text in texts]
    found = fine_tuning.question_scores(test, right)
    assert found.pop("no_answer_share") == 0.25 and set(found.values()) == {1.0}
    silent = fine_tuning.question_scores(test, [{**row, "answer": ""} for row in right])
    assert silent == baseline | {name: 1.0 for name in found if name.startswith(("has_answer", "best"))}


@pytest.mark.parametrize("task", ["film_reviews", "questions"])
def test_every_run_has_a_config_that_loads_and_begins_from_its_case(task, reviews, articles, tmp_path):
    data = {"film_reviews": reviews, "questions": articles}[task]
    args = fine_tuning._parser().parse_args([task, str(data), str(tmp_path / "out"), "--pretraining-steps", "7"])
    experiment = fine_tuning.Experiment(args)
    for system in fine_tuning.SYSTEMS:
        pretraining = experiment.pretraining(system)
        assert config.load(pretraining.config, pretraining.overrides).train.steps == 7
        begins = {"pretrained": (str(pretraining.folder), None), "new": (None, "wikipedia/sentencepiece.model")}
        for start, begin in begins.items():
            run = experiment.fine_tuning(Case(system, start), 2e-4, 1)
            loaded = config.load(run.config, run.overrides)
            assert (loaded.init_from, loaded.data.tokenizer) == begin
            assert (loaded.optimizer.learning_rate, loaded.train.seed) == (2e-4, 1)
            assert run.folder.name == f"{task}-{system}-{start}-0.0002-1"


def test_sizes_in_one_folder_have_runs_of_their_own(reviews, tmp_path):
    found = []
    for size in fine_tuning.TABLE["sizes"]:
        args = ["film_reviews", str(reviews), str(tmp_path / "out"), "--size", size]
        experiment = fine_tuning.Experiment(fine_tuning._parser().parse_args(args))
        run = experiment.fine_tuning(Case("flash", "pretrained"), experiment.rates[0], 0)
        found.append((run.folder, experiment.pretraining("flash").folder, config.load(run.config).model["width"]))
    assert [width for *_, width in found] == [256, 768] and len({path for pair in found for path in pair[:2]}) == 4


def test_wrong_arguments_are_said_in_a_line():
    for more, message in (
        (["a", "b", "--systems", "flsh"], "no system is called 'flsh'; did you mean 'flash'"),
        (["a"], "DATA and OUT are needed"),
        (["a", "b", "--seeds", "0"], "--seeds must be 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            fine_tuning.main(["questions", *more])


@pytest.mark.full
@pytest.mark.parametrize("task", ["film_reviews", "questions"])
def test_two_starts_are_trained_scored_and_kept(task, reviews, articles, tmp_path, capsys):
    made_text.write(tmp_path, 3_000)
    made_text.write_vocabulary(tmp_path, TINY["model.vocabulary_size"])
    data, file = {"film_reviews": reviews, "questions": articles}[task], tmp_path / "found.jsonl"
    flags = [task, str(data), str(tmp_path / "out"), "--wikipedia", str(tmp_path / "wikipedia"), "--parallel", "2"]
    flags += ["--seeds", "2", "--systems", "flash", "--results", str(file), "--commit", "here"]
    flags += [text for key, value in TINY.items() for text in ("--set", f"{key}={value}")]
    assert fine_tuning.main(flags) == 0
    rows = result_files.read(file)
    assert [(row["system"], row["start"]) for row in rows] == [("flash", "pretrained"), ("flash", "new")]
    for row in rows:
        assert row["learning_rate"] in (2e-4, 1e-3) and row["steps"] == 2 and row["variant"]
        assert len(row["validation"]) == 2 and all(len(values) == 2 for values in row["test"].values())
        assert (row["pretraining_perplexity"] is None) == (row["start"] == "new")
        assert ("has_answer_f1" in row["test"]) == (task == "questions")
    capsys.readouterr()
    assert fine_tuning.main(flags) == 0
    assert fine_tuning.main([*flags, "--table"]) == 0
    first, second = capsys.readouterr().out.strip().split("task ")[1:]
    assert first.strip() == second.strip() and second.count("flash") == 2
    assert result_files.read(file) == rows
