"""Classifiers of long texts: the rows of a table, their configs, and whole runs at a tiny size."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import long_range, result_files
from flash_tf import config, model_zoo
from flash_tf.registry import listed
from flash_tf.training import modelling, preflight
from tests import backends

SYSTEMS = tuple(long_range.TABLE["systems"])
TASKS = tuple(long_range.TABLE["tasks"])
ROWS = {  # of TransNormer's Table 6
    "Transformer": "transformer",
    "Kernelized Attention": "kernelized",
    "Nystromformer": "nystromformer",
    "Linformer": "linformer",
    "Informer": "informer",
    "Performer": "performer_favor",
    "Reformer": "reformer",
    "BigBird": "bigbird",
    "Skyformer": "skyformer",
    "LS": "transformer_ls",
    "cosFormer": "cosformer",
    "FLASH-quad": "flash_quad",
    "FLASH": "flash",
    "TransNormer T1": "transnormer_t1",
    "TransNormer T2": "transnormer_t2",
}


def run_of(system, task, *flags, seed=0):
    args = long_range._parser().parse_args(["out", "--task", task, *flags])
    return long_range.training({"task": task, "system": system, "seed": seed}, args)


def loaded(system, task="list_ops", *flags, **more):
    run = run_of(system, task, *flags, **more)
    return config.load(run.config, run.overrides)


def test_every_row_of_the_paper_is_a_system_and_of_its_mixers():
    assert set(ROWS.values()) == set(SYSTEMS) - {"one_plus_elu"}
    small = [name.partition("/") for name in config.names()]
    assert set(SYSTEMS) <= {name for folder, _, name in small if folder in model_zoo.FOLDERS}
    for system, row in long_range.TABLE["systems"].items():
        known = listed(config.load(f"wikitext2_mlm/{system}").model["mixer"])
        what = [
            [(mixer["type"], mixer.get("features")) for mixer in mixers] for mixers in (listed(row["mixer"]), known)
        ]
        assert what[0] == what[1]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_takes_its_data_and_sizes_and_the_model_of_the_system(task):
    text = ["--text", "reviews"] if task == "text" else []
    found = loaded("transnormer_t2", task, *text, seed=3)
    own = config.load(long_range.TABLE["tasks"][task]["config"])
    assert (found.model["type"], found.model["classes"]) == (own.model["type"], own.model["classes"])
    assert found.model["vocabulary_size"] == own.model["vocabulary_size"]
    assert (found.model["depth"], found.model["norm"], found.train.seed) == (2, "simple_rms_norm", 3)
    assert [mixer["type"] for mixer in found.model["mixer"]] == ["diag_attention", "linear_attention"]
    if task.startswith("arena_"):
        assert (found.data, found.train.steps, found.optimizer) == (own.data, own.train.steps, own.optimizer)
    if task == "text":
        assert (found.data.source["train"], found.data.labels) == ("reviews/train.jsonl", ["neg", "pos"])


def test_mixers_that_know_the_length_know_the_task_s():
    assert loaded("linformer").model["mixer"][0]["max_length"] == 256
    assert loaded("cosformer", "pathfinder").model["mixer"][0]["cosine_length"] == 1152
    assert loaded("cosformer", "arena_retrieval").model["mixer"][0]["cosine_length"] == 4096


def model_of(system, task):
    backends.seed(0)
    return modelling.make_model(preflight.check_values(loaded(system, task))[0])


@pytest.mark.full
@pytest.mark.parametrize("task", ["list_ops", "arena_retrieval"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_step_of_a_row_gives_every_weight_a_gradient(system, task):
    run = run_of(system, task)
    found = config.load(run.config, [*run.overrides, "data.sequence_length=256", "train.precision=float32"])
    backends.seed(0)
    model, rng = modelling.make_model(found), np.random.default_rng(0)
    classes, n = found.model["classes"], 64
    shape = (4, 2, n) if found.model["type"] == "matcher" else (4, n)
    ids = rng.integers(0, found.model["vocabulary_size"], shape).astype("int32")
    given = {"token_ids": ids, "padding_mask": np.arange(n) < rng.integers(20, n, shape[:-1])[..., None]}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    labels, optimizer = np.arange(4) % classes, keras.optimizers.Adam(1e-3)
    with tf.GradientTape() as tape:
        before = loss(labels, model(given, training=True))
    weights = model.trainable_variables
    gradients = [tf.convert_to_tensor(gradient).numpy() for gradient in tape.gradient(before, weights)]
    dead = [v.path for v, g in zip(weights, gradients, strict=True) if not (np.isfinite(g).all() and g.any())]
    assert np.isfinite(before) and not dead
    optimizer.apply(gradients, weights)
    assert loss(labels, model(given)) < before


@pytest.mark.full
def test_rows_weigh_as_much_as_the_transformer_but_for_what_is_their_own():
    def count(system):
        return sum(math.prod(v.shape) for v in model_of(system, "list_ops").trainable_variables)

    whole = count("transformer")
    for system in set(SYSTEMS) - {"reformer", "linformer", "transformer_ls"}:
        assert count(system) == pytest.approx(whole, rel=0.03)
    assert whole - count("reformer") == 2 * 64 * 65  # queries and keys are one product, in both blocks
    assert count("linformer") - whole == 2 * 2 * 128 * 256


def test_a_table_has_the_paper_s_order_and_a_rate_where_the_run_was_alone():
    same = {"device": "a device", "task": "text", "seed": 0, "length": 2048, "steps": 10, "tokens_per_step": 4096}
    same |= {"parameters": 90_000, "accuracy": 0.5, "held_out": 200, "steps_per_second": 12.34}
    rows = [{**same, "system": "flash", "parallel": 4}, {**same, "system": "transformer", "parallel": 1}]
    rows.append({**same, "task": "list_ops", "system": "flash", "parallel": 1, "steps_per_second": None})
    text, list_ops = long_range.as_text(rows).split("\n\n")
    assert text.splitlines()[0] == "text, length 2,048, 10 steps of 4,096 tokens, seed 0, on a device"
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["transformer", "90,000", "50.0%", "200", "12.3"],
        ["flash", "90,000", "50.0%", "200", "–"],
    ]
    assert list_ops.splitlines()[2].split()[-1] == "–"


@pytest.mark.parametrize(("flags", "message"), [
    (["--systems", "flsh"], r"no system is called 'flsh'; did you mean 'flash'\? There are: transformer, "),
    (["--task", "text"], "--text DIR and --task text belong together"),
    (["--text", "reviews"], "--text DIR and --task text belong together"),
    (["--task", "text", "--text", "none"], "--text none needs none/train.jsonl, and there is none"),
    (["--parallel", "0"], "--parallel must be 1 or more, got 0"),
])  # fmt: skip
def test_wrong_arguments_are_said_in_a_line(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        long_range.main(["out", *flags])
    with pytest.raises(ValueError, match="OUT is needed"):
        long_range.main([])
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_systems_learn_and_are_not_trained_again(tmp_path, capsys):
    rows = [{"text": "xo"[good] * (9 + i % 7) + " " + "a" * i, "label": ("neg", "pos")[good]}
            for i in range(40) for good in (0, 1)]  # fmt: skip
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "found.jsonl"
    sizes = {"data.sequence_length": 64, "train.steps": 60, "train.tokens_per_step": 1024, "train.steps_per_loop": 10,
             "train.checkpoint_every": 60, "optimizer.warmup_steps": 0, "optimizer.learning_rate": 0.003}  # fmt: skip
    flags = [str(tmp_path / "out"), "--task", "text", "--text", str(tmp_path), "--results", str(file)]
    flags += ["--commit", "here", *(x for name, value in sizes.items() for x in ("--set", f"{name}={value}"))]

    assert long_range.main([*flags, "--systems", "cosformer"]) == 0
    (first,) = result_files.read(file)
    assert (first["task"], first["system"], first["steps"], first["length"]) == ("text", "cosformer", 60, 64)
    assert first["accuracy"] > 0.9 and first["held_out"] == 80 and first["steps_per_second"] > 0
    assert long_range.main([*flags, "--systems", "cosformer", "linformer", "bigbird"]) == 0
    rows = result_files.read(file)
    assert rows[0] == first and {row["system"] for row in rows[1:]} == {"linformer", "bigbird"}
    assert capsys.readouterr().out.splitlines()[-1].split()[0] in long_range.TABLE["systems"]
