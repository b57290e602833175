"""One pass over WikiText-2 for every system: which trainings there are, what they share, and the table."""

from pathlib import Path

import pytest

from benchmarks import device, one_pass, result_files
from flash_tf import config
from flash_tf.training.progress import Progress


@pytest.fixture
def given(tmp_path, monkeypatch):
    """The checked arguments of a command beside the set's files."""
    monkeypatch.chdir(tmp_path)
    Path("wikitext-2").mkdir()
    for name in ("train.txt", "valid.txt"):
        Path("wikitext-2", name).touch()
    parse = lambda *more: result_files.parse(one_pass._parser(), ["out", "--text", "wikitext-2", *more])  # noqa: E731
    return lambda *more: one_pass._checked(parse(*more))


def test_every_system_is_trained_at_every_rate_with_one_text_and_order(given):
    args = given()
    names = {name.partition("/")[0] for name in args.of}
    assert names == {"wikitext2_lm", "wikitext2_mlm"} and len(args.of) == 58
    folders = set()
    for name in args.of:
        for rate in args.rates:
            run = one_pass.training(name, rate, args, "out/first")
            folders.add(run.folder)
            loaded = config.load(run.config, run.overrides)
            assert loaded.optimizer.learning_rate == rate and loaded.train.steps == 1441
            assert loaded.data.source["validation"] == "wikitext-2/valid.txt" and loaded.data.tokenizer == "out/first"
            assert (loaded.train.tokens_per_step, loaded.data.sequence_length) == (2048, 256)
    assert len(folders) == len(args.of) * len(args.rates)


def row(name, rate, perplexity, **more):
    return {
        "device": "a GPU",
        "config": name,
        "learning_rate": rate,
        "steps": 9,
        "seed": 0,
        "perplexity": perplexity,
    } | more


def test_the_table_has_a_column_for_each_rate_and_the_best_is_the_lowest_of_the_newest_rows():
    rows = [row("wikitext2_lm/a", 0.003, 20.0), row("wikitext2_lm/a", 0.006, 60.0)]
    rows += [row("wikitext2_lm/a", 0.003, 50.0), row("wikitext2_lm/b", 0.003, None), row("wikitext2_lm/c", 0.006, 7.5)]
    lines = one_pass.as_text(rows).splitlines()
    assert lines[0] == "a GPU, wikitext2_lm, 9 steps, seed 0"
    assert [line.split() for line in lines[1:]] == [
        ["config", "0.003", "0.006"],
        ["a", "50.00", "60.00"],
        ["b", "diverged", "–"],
        ["c", "–", "7.50"],
    ]
    assert one_pass.best(rows) == {"wikitext2_lm/a": 50.0, "wikitext2_lm/c": 7.5}


@pytest.mark.parametrize(
    "wrong, said",
    [
        (["--of", "quickstart"], "--of takes configs of wikitext2_lm and wikitext2_mlm, got 'quickstart'"),
        (["--rates", "0"], "--rates must be above 0, got 0"),
        (["--steps", "0"], "--steps must be 1 or more, got 0"),
        (["--text", "nowhere"], "--text nowhere needs train.txt, and there is none"),
    ],
)
def test_wrong_options_are_one_line(given, wrong, said):
    with pytest.raises(ValueError, match=said):
        given(*wrong)


def test_other_steps_are_a_variant_that_tables_leave_out(given):
    assert given().variant is None and given("--steps", "9").variant == "9 steps"


def test_nothing_is_trained_where_no_tokenizer_was_made(given, monkeypatch):
    asked = []

    def train(runs, *more):
        asked.append([run.config for run in runs])
        return [False for _ in runs]

    monkeypatch.setattr(one_pass.in_parallel, "train", train)
    args = given("--of", "wikitext2_lm/gla", "wikitext2_lm/retnet", "--results", "rows.jsonl", "--commit", "here")
    assert one_pass._measure(args, Progress()) == 1
    assert asked == [["wikitext2_lm/gla"]]


@pytest.mark.full
def test_the_first_of_each_folder_makes_the_tokenizer_and_one_that_diverges_is_a_row(tmp_path, capsys):
    words = lambda i: " ".join(f"{i * j % 997:x}{i}word{j * j % 89:o}" for j in range(60))  # noqa: E731
    text = "".join(f" = Part {i} = \n\n {words(i)} \n\n" for i in range(200))
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text(text)
    file, out = str(tmp_path / "rows.jsonl"), tmp_path / "out"
    size = ["model.depth=1", "model.width=16", "model.vocabulary_size=300", "data.sequence_length=64"]
    size += ["train.tokens_per_step=128", "data.source.counts_words=false"]
    size = [text for one in size for text in ("--set", one)]
    of = ["--of", "wikitext2_lm/transformer_plus_plus", "wikitext2_lm/one_plus_elu", "--steps", "4"]
    command = [str(out), "--text", str(tmp_path), *of, *size, "--parallel", "1", "--results", file, "--commit", "here"]
    assert one_pass.main([*command, "--rates", "1e-3"]) == 0
    assert one_pass.main([*command, "--rates", "1e-3", "1e30"]) == 0
    rows = result_files.read(file)
    assert [(r["config"].partition("/")[2], r["learning_rate"], r["perplexity"] is None) for r in rows] == [
        ("transformer_plus_plus", 1e-3, False),
        ("one_plus_elu", 1e-3, False),
        ("transformer_plus_plus", 1e30, True),
        ("one_plus_elu", 1e30, True),
    ]
    assert "diverged" in capsys.readouterr().out
    first, second = (out / f"wikitext2_lm-{name}-0.001-0" for name in ("transformer_plus_plus", "one_plus_elu"))
    assert (first / "tokenizer.model").read_bytes() == (second / "tokenizer.model").read_bytes()
    assert device.cpu() == rows[0]["device"]
