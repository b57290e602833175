"""Folders that the package writes: a user's file in them is never changed, and no moment leaves half a folder."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flash_tf import owned_files

ROOT = Path(__file__).parents[2]
WRITER = "flash-tf export"
FOREVER = """
import itertools, sys
from flash_tf import owned_files
for version in itertools.count():
    with owned_files.replacing(sys.argv[1], "flash-tf export", lambda folder: ()) as folder:
        for number in range(6):
            (folder / f"{number}").write_text(f"{version} " * 1000)
    print(version, flush=True)
"""


def none(folder):
    return ()


def replace(out, older=none, **files):
    with owned_files.replacing(str(out), WRITER, older) as folder:
        for name, text in files.items():
            (folder / name).write_text(text)


def contents(folder):
    """Path -> content of everything below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else os.readlink(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() or path.is_symlink()
    }


def test_a_folder_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path):
    out = tmp_path / "out"
    replace(out, a="1", b="2")
    replace(out, b="3", c="4")
    assert {name: contents(out)[name] for name in ("b", "c")} == {"b": b"3", "c": b"4"}
    assert contents(out).keys() == {"b", "c", ".flash-tf.json"}
    with pytest.raises(OSError, match="disk"), owned_files.replacing(str(out), WRITER, none) as folder:
        (folder / "d").write_text("5")
        raise OSError("no disk")
    assert contents(out).keys() == {"b", "c", ".flash-tf.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "out").symlink_to("there")
    replace(tmp_path / "out", a="1")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "there/a").read_text() == "1"


def add(name):
    return lambda out: (out / name).write_text("mine")


def below(out):
    (out / "notes").mkdir()
    (out / "notes/mine").write_text("mine")


def linked(out):
    (out / "a").unlink()
    (out / "a").symlink_to(out.parent / "elsewhere")


FOREIGN = {
    "a user's file": (add("mine"), "mine, which flash-tf export did not write"),
    "a user's file in a folder": (below, "notes/mine, which flash-tf export did not write"),
    "a file that a user changed": (add("a"), "a, which has changed since flash-tf export wrote it"),
    "a link in place of a file": (linked, "a, which flash-tf export did not write"),
    "a link to a folder": (lambda out: (out / "b").symlink_to(out.parent), "b, which flash-tf export did not write"),
    "a pipe": (lambda out: os.mkfifo(out / "pipe"), "pipe, which flash-tf export did not write"),
    "a manifest that a user wrote": (add(owned_files.MANIFEST), "which flash-tf export did not write"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_folder_with_a_file_that_is_not_ours_is_refused_and_left_as_it_is(tmp_path, what):
    out, (change, said) = tmp_path / "out", FOREIGN[what]
    replace(out, a="1")
    change(out)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"out holds .*{said}: give another folder"):
        replace(out, a="2")
    assert contents(tmp_path) == before


def test_a_file_that_comes_while_a_folder_is_made_stays(tmp_path):
    out = tmp_path / "out"
    replace(out, a="1")
    with pytest.raises(ValueError, match="holds mine"), owned_files.replacing(str(out), WRITER, none):
        (out / "mine").write_text("mine")
    assert (out / "mine").read_text() == "mine" and (out / "a").read_text() == "1"


def test_a_folder_of_another_writer_is_refused(tmp_path):
    owned_files.write(str(tmp_path / "out"), {"plot.html": b"1"}, "flash-tf plot")
    with pytest.raises(ValueError, match="holds plot.html, which flash-tf export did not write"):
        replace(tmp_path / "out", a="1")


def test_files_a_bucket_the_working_directory_and_a_second_writer_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below"):
        with pytest.raises(ValueError, match=f"{out} needs to be a folder, and .*/file is a file"):
            replace(tmp_path / out)
    with pytest.raises(ValueError, match="flash-tf export needs a local folder, .*, got gs://there/out"):
        replace("gs://there/out")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for out in (".", ".."):
        with pytest.raises(ValueError, match="neither the working directory nor a mount point, got|file, which"):
            replace(out, a="1")
    with owned_files.replacing(str(tmp_path / "out"), WRITER, none) as folder:
        (folder / "a").write_text("1")
        with pytest.raises(ValueError, match="out needs one writer at a time"):
            replace(tmp_path / "out", a="2")
    assert (tmp_path / "out/a").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out", "work"]


def test_what_a_folder_from_before_manifests_proves_is_replaced_and_nothing_else(tmp_path):
    (tmp_path / "a").write_text("1")
    replace(tmp_path, older=lambda folder: ["a"], b="2")
    assert contents(tmp_path).keys() == {"b", ".flash-tf.json"}
    (tmp_path / "old").mkdir()
    for name in ("a", "mine"):
        (tmp_path / "old" / name).write_text("1")
    with pytest.raises(ValueError, match="holds mine"):
        replace(tmp_path / "old", older=lambda folder: ["a"], b="2")


@pytest.mark.parametrize("moments", [3, pytest.param(40, marks=pytest.mark.full)])
def test_a_process_that_is_killed_leaves_a_whole_folder(tmp_path, moments):
    out, draw = tmp_path / "out", random.Random(0)
    for _ in range(moments):
        options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", FOREVER, str(out)], **options) as process:
            process.stdout.readline()  # from here on there is a folder
            time.sleep(draw.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        written = {path.read_text() for path in out.iterdir() if path.name != owned_files.MANIFEST}
        assert len(list(out.iterdir())) == 7 and len(written) == 1
        owned_files.check_folder(str(out), WRITER, none)
    replace(out, a="1")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # what killed processes left is gone


def test_where_names_cannot_be_exchanged_a_killed_process_loses_no_folder(tmp_path, monkeypatch):
    out = tmp_path / "out"
    replace(out, a="1")
    monkeypatch.setattr(owned_files, "_exchanged", lambda one, other: False)
    replace(out, a="2")
    assert (out / "a").read_text() == "2"
    (tmp_path / ".out.flash-tf").mkdir()
    out.rename(tmp_path / ".out.flash-tf/old")  # killed after the first rename
    with pytest.raises(OSError, match="disk"), owned_files.replacing(str(out), WRITER, none):
        raise OSError("no disk")
    assert (out / "a").read_text() == "2" and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_names_cannot_be_exchanged_a_rename_that_fails_brings_the_older_folder_back(tmp_path, monkeypatch):
    out, rename = tmp_path / "out", Path.rename
    replace(out, a="1")

    def fails(self, to):
        if self.name == "new":
            raise OSError("stale")
        return rename(self, to)

    monkeypatch.setattr(owned_files, "_exchanged", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="stale"):
        replace(out, a="2")
    assert (out / "a").read_text() == "1" and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("where", ["local", "bucket"])
def test_files_among_others_are_written_over_only_while_they_are_ours(tmp_path, where):
    tf = pytest.importorskip("tensorflow")
    folder = f"{tmp_path}/out" if where == "local" else f"ram://{tmp_path.name}"
    write = lambda **files: owned_files.write(folder, {k: v.encode() for k, v in files.items()}, WRITER)  # noqa: E731

    def read(name):
        with tf.io.gfile.GFile(f"{folder}/{name}") as file:
            return file.read()

    def put(name):
        if tf.io.gfile.exists(f"{folder}/{name}"):
            tf.io.gfile.remove(f"{folder}/{name}")  # ram:// does not cut a file that is opened anew
        with tf.io.gfile.GFile(f"{folder}/{name}", "w") as file:
            file.write("mine")

    write(a="1", b="1")
    write(a="2")
    put("mine")
    put("b")
    for name, said in (("mine", "which flash-tf export did not write"), ("b", "which has changed since")):
        with pytest.raises(ValueError, match=f"holds {name}, {said}"):
            write(a="3", **{name: "3"})
        with pytest.raises(ValueError, match=f"holds {name}, {said}"):
            owned_files.check(folder, ["a", name], WRITER)
    assert [read(name) for name in ("a", "b", "mine")] == ["2", "mine", "mine"]
    assert owned_files.own(folder, WRITER) == {"a"}
    owned_files.remove(folder, ["a", "b", "mine"], WRITER)
    assert set(tf.io.gfile.listdir(folder)) == {"b", "mine", owned_files.MANIFEST}


def test_a_process_that_is_killed_between_manifest_and_file_leaves_a_file_that_is_still_ours(tmp_path, monkeypatch):
    folder, store = str(tmp_path), owned_files._store
    owned_files.write(folder, {"a": b"1"}, WRITER)

    def killed(path, data):
        if path.endswith("a"):
            raise KeyboardInterrupt
        store(path, data)

    for new in (b"2", b"3"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owned_files, "_store", killed)
            owned_files.write(folder, {"a": new}, WRITER)
    assert (tmp_path / "a").read_bytes() == b"1"
    owned_files.write(folder, {"a": b"4"}, WRITER)
    assert (tmp_path / "a").read_bytes() == b"4"
