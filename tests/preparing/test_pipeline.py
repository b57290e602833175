"""Apache Beam itself, where `pip install -e ".[dev,prepare]"` has brought it."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from flash_tf import config
from flash_tf.preparing.prepare import prepare
from tests.data import tfds_fixture
from tests.data.test_token_cache import ROOT
from tests.preparing.here import Here
from tests.training import runs

pytest.importorskip("apache_beam")
pytestmark = pytest.mark.full

FILES, DOCUMENTS = 12, 3000


@pytest.fixture
def many(tmp_path):
    """A config over a TFDS data set of several equal files, each some tenths of a second's work."""
    runs.corpus(tmp_path)
    lines = (tmp_path / "train.txt").read_text().splitlines()
    texts = [" ".join(lines[(i * k) % len(lines)] for k in range(1, 9)) for i in range(DOCUMENTS)]
    tfds_fixture.store("c4/en:3.1.0", tmp_path / "data", {"train": texts, "validation": texts[:9]})
    folder = tmp_path / "data/c4/en/3.1.0"
    about = json.loads((folder / "dataset_info.json").read_text())
    next(one for one in about["splits"] if one["name"] == "train")["shardLengths"] = [str(DOCUMENTS)] * FILES
    (folder / "dataset_info.json").write_text(json.dumps(about))
    first = (folder / "c4-train.tfrecord-00000-of-00001").rename(folder / f"c4-train.tfrecord-00000-of-{FILES:05d}")
    for i in range(1, FILES):
        os.link(first, folder / f"c4-train.tfrecord-{i:05d}-of-{FILES:05d}")
    source = {"type": "tfds", "name": "c4/en:3.1.0", "data_dir": str(tmp_path / "data")}
    return runs.write(tmp_path, data={"source": source, "tokenizer": {"train": "word"}})


def start(path, out, *arguments):
    """`flash-tf prepare` in a process of its own, whose group has its workers."""
    command = [sys.executable, "-m", "flash_tf.cli", "prepare", path, "--out", str(out), "--json", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)


def test_processes_write_what_one_process_writes_also_after_a_kill(many, tmp_path):
    prepare(config.load(many), str(tmp_path / "here"), runs.Lines(), Here())
    killed = start(many, tmp_path / "out", "--processes", "2")
    while not list((tmp_path / "out").glob("train/*.json")):
        assert killed.poll() is None
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    written = len(list((tmp_path / "out").glob("*/*.json")))
    assert 0 < written < FILES + 1
    output, errors = (again := start(many, tmp_path / "out", "--processes", "2")).communicate()
    assert again.returncode == 0, errors
    assert f"{written} of {FILES + 1} units of text are there already" in errors
    assert f"prepared {FILES + 1 - written} of {FILES + 1 - written} units of text" in errors
    assert json.loads(output)["train_documents"] == FILES * DOCUMENTS
    there = runs.contents(tmp_path / "out")
    assert {name: data for name, data in there.items() if ".partial" not in name} == runs.contents(tmp_path / "here")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_text_that_cannot_be_read_is_named_in_one_line(many, tmp_path, processes):
    file = tmp_path / "data/c4/en/3.1.0" / f"c4-train.tfrecord-00005-of-{FILES:05d}"
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-100])
    _, errors = (failed := start(many, tmp_path / "out", "--processes", processes)).communicate()
    assert failed.returncode == 1
    assert re.fullmatch(rf"flash-tf: .*{file}.*", errors.splitlines()[-1])


def test_a_flag_that_beam_does_not_know_is_refused_before_any_work(many, tmp_path):
    _, errors = (failed := start(many, tmp_path / "out", "--beam", "--runer=DataflowRunner")).communicate()
    assert failed.returncode == 1 and not (tmp_path / "out").exists()
    assert errors.splitlines() == ["flash-tf: Apache Beam has no option --runer"]
    from flash_tf.preparing import pipeline

    pipeline.check(["--runner=DataflowRunner", "--no_use_public_ips", "--worker_machine_type=n1-standard-4"])


def test_beams_own_flags_choose_a_runner(many, tmp_path):
    flags = ("--runner=apache_beam.runners.portability.fn_api_runner.FnApiRunner", "--direct_num_workers=1")
    _, errors = (done := start(many, tmp_path / "out", "--beam", *flags)).communicate()
    assert done.returncode == 0, errors
