"""Classifiers of long texts: the rows of a table, and texts whose class a byte tells."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import backends, device, long_range, result_files
from flash_tf import config, model_zoo
from flash_tf.registry import listed

LENGTH = 64
SYSTEMS = tuple(long_range.TABLE["systems"])
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reviews")
    for name, byte in (("bad", "x"), ("good", "o")):
        (folder / name).mkdir()
        for i in range(40):
            (folder / name / f"{name}{i}.txt").write_text(f"{byte * (i % 7 + 9)} {'a' * i}")
    return str(folder)


def flags(folder, file, *more, steps=60):
    sizes = {"length": LENGTH, "steps": steps, "batch": 16, "learning-rate": 0.003, "results": file, "commit": "here"}
    return [folder, *(text for name, value in sizes.items() for text in (f"--{name}", str(value))), *more]


def write(folder, *names, text="abc"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


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


@pytest.mark.full
@pytest.mark.parametrize("pairs", [False, True], ids=["classifier", "matcher"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_step_of_a_row_gives_every_weight_a_gradient(system, pairs):
    keras.utils.set_random_seed(0)
    model, rng = long_range.make(system, 3, LENGTH, pairs=pairs), np.random.default_rng(0)
    shape = (4, 2, LENGTH) if pairs else (4, LENGTH)
    ids = rng.integers(0, 256, shape).astype("int32")
    given = {"token_ids": ids, "padding_mask": np.arange(LENGTH) < rng.integers(20, LENGTH, shape[:-1])[..., None]}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    labels, optimizer = np.array([0, 1, 2, 1]), keras.optimizers.Adam(1e-3)
    with tf.GradientTape() as tape:
        before = loss(labels, model(given, training=True))
    weights = model.trainable_variables
    gradients = [tf.convert_to_tensor(gradient).numpy() for gradient in tape.gradient(before, weights)]
    dead = [v.path for v, g in zip(weights, gradients, strict=True) if not (np.isfinite(g).all() and g.any())]
    assert np.isfinite(before) and not dead
    optimizer.apply(gradients, weights)
    assert loss(labels, model(given)) < before


def test_rows_weigh_as_much_as_the_transformer_but_for_what_is_their_own():
    def count(system):
        model = long_range.make(system, 2, LENGTH)
        model.build()
        return sum(math.prod(v.shape) for v in model.trainable_variables)

    whole = count("transformer")
    for system in set(SYSTEMS) - {"reformer", "linformer", "transformer_ls"}:
        assert count(system) == pytest.approx(whole, rel=0.03)
    assert whole - count("reformer") == 2 * 64 * 65  # queries and keys are one product, in both blocks
    assert count("linformer") - whole == 2 * 2 * 128 * LENGTH


@pytest.mark.full
def test_a_system_learns_and_is_not_trained_again(folder, tmp_path, capsys):
    file = tmp_path / "found.jsonl"
    assert long_range.main(flags(folder, file, "--systems", "cosformer")) == 0
    (first,) = result_files.read(file)
    assert (first["task"], first["system"]) == ("text", "cosformer")
    assert first["accuracy"] > 0.9 and first["held_out"] >= 2
    assert long_range.main(flags(folder, file, "--systems", "cosformer", "linformer")) == 0
    rows = result_files.read(file)
    assert [row["system"] for row in rows] == ["cosformer", "linformer"] and rows[0] == first
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["text", "linformer"]
    assert long_range.main(flags(folder, file, "--systems", "cosformer", steps=2)) == 0  # another setting
    assert [row["steps"] for row in result_files.read(file)] == [60, 60, 2]


@pytest.mark.full
def test_pairs_are_matched_and_stand_beside_other_tasks_rows(tmp_path, capsys):
    for label in ("no", "yes"):
        for i in range(40):
            text = f"{'o' if (i % 2 == 0) == (label == 'yes') else 'x'}{'a' * i}"
            write(tmp_path / "data" / label, f"{i}.1.txt", text=text * 3)
            write(tmp_path / "data" / label, f"{i}.2.txt", text="xo"[i % 2 == 0] * 9)  # yes: the first text's byte
    file = tmp_path / "found.jsonl"
    file.write_text("".join(json.dumps(_row(task)) + "\n" for task in ("text", "image")))
    arguments = flags(str(tmp_path / "data"), file, "--task", "retrieval", "--systems", "performer_favor", steps=150)
    assert long_range.main(arguments) == 0
    *others, row = result_files.read(file)
    assert others == [_row("text"), _row("image")]
    assert (row["task"], row["system"]) == ("retrieval", "performer_favor") and row["accuracy"] > 0.9
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["task", "text", "image", "retrieval"]


def _row(task):
    return {
        "task": task, "system": "performer_favor", "parameters": 1, "accuracy": 0.5, "held_out": 2, "ms_per_step": 3.0,
        "device": backends.device_name(), "commit": "here",
    }  # fmt: skip


def test_any_file_is_bytes_cut_and_padded(tmp_path):
    for i in range(20):
        write(tmp_path / "a", f"{i}.gray", ".hidden", text="\0\1\2\3\4")
        write(tmp_path / "b", f"{i}", text="z")
    data = long_range.Texts(tmp_path, 3)
    assert data.classes == ["a", "b"] and len(data.train) + len(data.held_out) == 40
    inputs, labels = data.batch(np.array([0, 39]))
    assert inputs["token_ids"].tolist() == [[0, 1, 2], [ord("z"), 0, 0]] and labels.tolist() == [0, 1]
    assert inputs["padding_mask"].tolist() == [[True] * 3, [True, False, False]]


@pytest.mark.parametrize(("task", "sizes"), [("retrieval", (4000, 16, 2e-4)), ("image", (1024, 256, 1e-4))])
def test_a_task_sets_what_no_flag_does(task, sizes):
    def taken(*more):
        args = long_range._checked(long_range._parser().parse_args(["folder", "--task", task, *more]))
        return args.length, args.batch, args.learning_rate

    assert taken() == sizes
    assert taken("--batch", "3", "--learning-rate", "0.5") == (sizes[0], 3, 0.5)


@pytest.mark.parametrize(("more", "names", "message"), [
    ([], ["one/a.txt"], r"needs two folders or more with files, one a class, has \['one'\]"),
    ([], ["one/a.txt", "two/b.txt"], r"needs more texts: of 2, 0 are held out"),
    (["--systems", "flsh"], [], r"no system is called 'flsh'; did you mean 'flash'\? There are: transformer, "),
    (["--length", "0"], [], "--steps, --batch and --length must be 1 or more, --learning-rate above 0"),
    (["--learning-rate", "0"], [], "--learning-rate above 0"),
    (["--task", "retrieval"], ["a/x.1.txt"], r"needs pairs of files, .*: x\.2\.txt is missing$"),
    (["--task", "retrieval"], ["a/x.2.txt"], r"needs pairs of files, .*: x\.2\.txt has no partner$"),
    (["--task", "retrieval"], ["a/x.txt"], r"needs pairs of files, .*: x\.txt has no partner$"),
])  # fmt: skip
def test_wrong_arguments_and_folders_are_said_in_a_line(tmp_path, more, names, message):
    with pytest.raises(ValueError, match=message):
        long_range.main([write(tmp_path, *names), *more])


def test_an_empty_file_and_a_missing_folder_are_named(tmp_path, monkeypatch):
    write(tmp_path, "a/x.txt", "b/y.txt")
    write(tmp_path, "b/z.txt", text="")
    with pytest.raises(ValueError, match=r"b/z\.txt is empty: a text needs at least one byte"):
        long_range.main([str(tmp_path)])
    monkeypatch.setattr("sys.argv", ["long_range", f"{tmp_path}/none"])
    with pytest.raises(SystemExit, match=f"^long_range: No such file or directory: {tmp_path}/none$"):
        device.program(long_range.main)
