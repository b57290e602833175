"""Recall against the state: the systems, their configs of a size, the table, and a whole run at a tiny size."""

import pytest

from benchmarks import in_parallel, recall, result_files
from flash_tf import config
from flash_tf.training import modelling


def parsed(*flags):
    return recall._parser().parse_args(["out", *flags])


def loaded(system, *flags):
    args = recall._checked(parsed(*flags))
    data = recall._data(args)
    case = {"task": args.task, **data, "width": (args.widths or [recall.WIDTH])[0]}
    run = recall.training({**case, "system": system}, 1e-3, data["overrides"], args)
    return config.load(run.config, run.overrides)


def test_every_config_of_recall_that_is_a_system_is_trained_and_causal():
    names = recall.systems()
    assert {"flash", "mamba", "transnormer_t2", "transformer_plus_plus"} <= {*names}
    assert not {*recall.OTHER} & {*names}
    assert {config.load(f"recall/{name}").model["type"] for name in names} == {"causal_lm"}


def test_a_run_has_the_data_width_and_rate_that_were_asked_for():
    found = loaded("retnet", "--length", "256", "--pairs", "16", "--widths", "128")
    assert (found.data.source["length"], found.data.source["pairs"], found.data.sequence_length) == (256, 16, 256)
    assert (found.model["width"], found.model["feedforward"]["hidden"]) == (128, 170)  # 85 at width 64
    assert (found.batch_size, found.optimizer.learning_rate, found.evaluation.every) == (512, 1e-3, None)
    assert loaded("retnet", "--length", "256", "--examples", "128").train.tokens_per_step == 32768
    assert loaded("cosformer", "--length", "512").model["mixer"]["cosine_length"] == 512
    mixed = ("--length", "256", "--pairs", "16", "--train-pairs", "4", "8", "16")
    assert loaded("retnet", *mixed).data.source["train_pairs"] == [4, 8, 16]
    assert "train_pairs" not in found.data.source
    assert (found.train.steps, found.train.checkpoint_every) == (4000, 4000)
    longer = loaded("retnet", "--steps", "16000").train
    assert (longer.steps, longer.checkpoint_every) == (16000, 16000)
    copying = loaded("flash", "--task", "selective_copying")
    assert copying.data == config.load("recall/selective_copying_mamba").data
    assert (copying.model["vocabulary_size"], copying.batch_size) == (24, 32)
    shorter = loaded("flash", "--task", "selective_copying", "--length", "64", "--pairs", "8")
    assert (shorter.data.source["length"], shorter.data.source["tokens"], shorter.data.sequence_length) == (56, 8, 64)
    assert shorter.batch_size == 32


def test_every_system_is_a_model_at_another_width_and_length():
    for system in recall.systems():
        found = loaded(system, "--length", "512", "--pairs", "32", "--widths", "256")
        assert modelling.with_masking(found).model["width"] == 256


def test_the_table_has_the_most_accurate_system_first():
    same = {
        "device": "a device",
        "task": "mqar",
        "length": 64,
        "pairs": 4,
        "examples": 512,
        "steps": 4000,
        "exact_match": 0.5,
    }
    same |= {"learning_rate": 0.003, "parameters": 430_000, "seconds": 12.4, "state_bytes": 4096}
    rows = [{**same, "system": name, "width": w, "accuracy": x} for name, w, x in
            (("flash", 128, 0.9), ("mamba", 128, 0.95), ("flash", 64, 0.1))]  # fmt: skip
    first, second = recall.as_text(rows).split("\n\n")
    assert first.splitlines()[0] == "mqar, length 64, 4 pairs or words, 512 examples a step, 4,000 steps, on a device"
    assert [line.split()[:3] for line in first.splitlines()[2:]] == [
        ["mamba", "128", "95.0%"],
        ["flash", "128", "90.0%"],
    ]
    mixed = recall.as_text([rows[0], {**rows[0], "train_pairs": "2 4", "accuracy": 0.8}]).split("\n\n")
    assert mixed[1].startswith("mqar, length 64, 4 pairs or words, trained with 2, 4 pairs, 512 examples a step")
    assert [each.splitlines()[2].split()[2] for each in mixed] == ["90.0%", "80.0%"]
    assert second.splitlines()[2].split() == ["flash", "64", "10.0%", "50.0%", "0.003", "430,000", "4,096", "12"]


def test_wrong_arguments_are_said_in_a_line(tmp_path):
    file = ["--results", str(tmp_path / "found.jsonl")]
    for flags, message in (
        ([str(tmp_path), "--systems", "flsh", *file], "no config of recall is called 'flsh'; did you mean 'flash'"),
        ([], "OUT is needed"),
        ([str(tmp_path), "--widths", "64", "0"], "--widths must be 1 or more, got 0"),
        ([str(tmp_path), "--length", "0"], "--length must be 1 or more, got 0"),
        ([str(tmp_path), "--rates", "0"], "--rates must be above 0, got"),
        ([str(tmp_path), "--set", "train.steps=2"], "--set train.steps has an option of its own: --steps"),
        ([str(tmp_path), "--train-pairs", "4", "0"], "--train-pairs must be 1 or more, got 0"),
        ([str(tmp_path), "--task", "selective_copying", "--train-pairs", "4"], "--train-pairs is an option of mqar"),
    ):
        with pytest.raises(ValueError, match=message):
            recall.main(flags)


def test_a_row_is_written_when_the_runs_of_its_rates_have_ended(tmp_path, monkeypatch):
    def train(trainings, at_once, progress, then):
        assert len(trainings) == 4
        for one in trainings[:3]:
            then(one)
        raise KeyboardInterrupt

    monkeypatch.setattr(in_parallel, "train", train)
    monkeypatch.setattr(recall, "_row", lambda runs, rates: {"of": [run.folder.name for run in runs]})
    file = tmp_path / "found.jsonl"
    with pytest.raises(KeyboardInterrupt):
        recall.main(
            [str(tmp_path / "out"), "--systems", "flash", "gla", "flash", "--results", str(file), "--commit", "here"]
        )
    (row,) = result_files.read(file)
    assert row["system"] == "flash" and row["of"] == [
        f"mqar-64-4-512-4000-128-flash-{rate}-0" for rate in ("0.001", "0.003")
    ]


@pytest.mark.full
@pytest.mark.parametrize("task", recall.TASKS)
def test_systems_are_trained_once_and_a_run_that_fails_leaves_the_others(task, tmp_path, capsys):
    out, file = str(tmp_path / "out"), tmp_path / "found.jsonl"
    flags = ["--task", task, "--results", str(file), "--commit", "here", "--parallel", "2"]
    few = [f"data.source.{split}=64" for split in ("train", "validation")]
    for option in ("train.steps_per_loop=1", "optimizer.warmup_steps=1", *few):
        flags += ["--set", option]
    flags += ["--steps", "2"]
    flags += ["--widths", "32", "--rates", "0.001", "0.003", "--systems", "flash", "transnormer_t2"]
    assert recall.main([out, *flags]) == 0
    rows = result_files.read(file)
    assert [row["system"] for row in rows] == ["flash", "transnormer_t2"]
    for row in rows:
        assert row["accuracy"] == max(row["accuracies"]) and row["state_bytes"] > 0 and row["seconds"] > 0
        assert row["steps"] == 2 and row["rates"] == ["0.001", "0.003"]
    assert recall.main([out, *flags]) == 0
    assert result_files.read(file) == rows
    capsys.readouterr()
    assert recall.main([f"{out}2", *flags, "--set", "model.depth=3"]) == 1  # not even, for two mixers
    assert "transnormer_t2" not in capsys.readouterr().out
    assert [row["system"] for row in result_files.read(file)] == ["flash", "transnormer_t2", "flash"]


def test_the_time_of_a_run_is_of_its_steps(tmp_path):
    run = in_parallel.Training("recall/flash", tmp_path / "run")
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").write_text(
        '{"tokens_per_second": 32768.0}\n' * 3 + '{"tokens_per_second": 16384.0}\n'
    )
    assert in_parallel.seconds(run) == 5.0


def test_a_table_has_the_rows_that_are_asked_for(capsys):
    assert recall.main(["--table", "--systems", "flash", "--length", "64", "--widths", "128"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mqar, length 64, ") and [line.split()[0] for line in lines[2:]] == ["flash"]
    assert recall.main(["--table", "--widths", "7"]) == 0 and not capsys.readouterr().out.strip()
