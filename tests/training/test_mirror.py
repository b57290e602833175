"""Weights & Biases gets a copy of the records: offline, in the model directory."""

import json
import struct

import pytest

from flash_tf import config
from flash_tf.training import mirror, preflight
from tests.training import runs


def logged(file, block=2**15):
    """The records of a file in LevelDB's log format, after a header of seven bytes."""
    place, record = 7, b""
    while place < len(file):
        if (left := block - place % block) < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", file, place + 4)
        record += file[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def copied(model_dir):
    """What the offline files of a run hold: its ids, and the last value of each name at each step."""
    from wandb.proto import wandb_internal_pb2

    ids, found = set(), {}
    for path in sorted((model_dir / "wandb").glob("offline-run-*/*.wandb")):
        for data in logged(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                found[name, items["_step"]] = value
    return ids, found


@pytest.mark.full
def test_a_resumed_run_has_all_its_records_in_one_run_of_the_project(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    runs.corpus(tmp_path)
    path, folder = runs.write(tmp_path, train={"checkpoint_every": 4}), tmp_path / "run"
    shown = runs.train(path, folder, "wandb=flash", stop_after=4)
    assert f"mirroring the records to {folder}/wandb/offline-run-" in shown
    runs.train(path, folder, "wandb=flash")
    (id,), found = copied(folder)
    assert id == (folder / "wandb.txt").read_text()
    for record in runs.records(folder):
        assert found["train/loss", record["step"]] == record["loss"]
    for record in runs.records(folder, "evaluations.jsonl"):
        assert found["validation/loss", record["step"]] == record["loss"]
    assert len(runs.records(folder)) == 8


def test_a_missing_library_is_said_before_any_work(tmp_path, monkeypatch):
    runs.corpus(tmp_path)
    monkeypatch.setattr(mirror.importlib.util, "find_spec", lambda name: None)
    loaded = config.load(runs.write(tmp_path), ["wandb=flash"])
    with pytest.raises(ValueError, match=r"wandb needs the package of this name: pip install 'flash-tf\[wandb\]'"):
        preflight.check(loaded)
