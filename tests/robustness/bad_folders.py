"""A folder of good and bad files for `bad_inputs.txt`: configs, texts, and two small runs, which may be damaged."""

import json
import os
import shutil
from pathlib import Path

from flash_tf import config
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.training import modelling, run_directory
from flash_tf.training.checkpoints import Checkpoints
from tests.training import runs

STEPS = (2, 4)
ANCHORS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30))
CONFIGS = {  # `bad/NAME.yaml`
    "empty": "",
    "text": "hello",
    "list": "- 1\n- 2\n",
    "open": "model: [",
    "quote": "paper: 'none",
    "tab": "\tmodel: 1",
    "twice": "base: quickstart\ntrain: {steps: 1, steps: 2}\n",
    "section_twice": "base: quickstart\ntrain: {steps: 1}\ntrain: {seed: 1}\n",
    "documents": "base: quickstart\n---\nbase: quickstart\n",
    "number_as_key": "1: 2",
    "list_as_key": "? [1]\n: 2",
    "boolean_as_key": "base: quickstart\non: 1\n",
    "tag": "!!python/object/apply:os.system [ls]",
    "set": "base: quickstart\npaper: !!set {a}\n",
    "binary_tag": "base: quickstart\npaper: !!binary aGk=\n",
    "bomb": f"a0: &a0 [{', '.join('x' * 10)}]\n{ANCHORS}",
    "itself": "model: &a [*a]",
    "no_anchor": "model: *a",
    "deep": "paper: " + "[" * 10_000,
    "deep_mappings": "{a: " * 3000,
    "many": f"paper: [{'1, ' * 30_000}1]",
    "large": "# " + "x" * 300_000,
    "zero": "paper: \0",
    "surrogate": 'paper: "\\ud800"',
    "unknown": "base: quickstart\nmodle: {}\n",
    "no_base": "base: nowhere\n",
    "own_base": "base: bad/own_base.yaml\n",
    "base_list": "base: [quickstart]\n",
    "no_model": "data: {source: {type: python_stdlib}}\n",
    "no_data": "model: {type: masked_lm}\n",
    "null_model": "base: quickstart\nmodel: null\n",
    "list_model": "base: quickstart\nmodel: [1]\n",
}
BYTES = {"latin": b"paper: \xe9", "binary": bytes(range(256)), "utf16": "paper: x".encode("utf-16")}
DAMAGE = {  # what becomes of a file
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "binary": lambda data: bytes(range(256)) * 8,
    "text": lambda data: b"hello: [1, 2\n",
    "null": lambda data: b"null\n",
    "list": lambda data: b"[]\n",
    "object": lambda data: b"{}\n",
    "folder": None,
}


def make(folder: Path) -> None:
    """Fills a folder, from which every command of the table is called."""
    runs.corpus(folder)
    before = Path.cwd()
    os.chdir(folder)  # for paths that stay right in a copy
    try:
        for kind in ("masked", "causal"):
            _run(kind)
    finally:
        os.chdir(before)
    (folder / "bad").mkdir()
    for name, text in CONFIGS.items():
        (folder / f"bad/{name}.yaml").write_text(text)
    for name, data in BYTES.items():
        (folder / f"bad/{name}.yaml").write_bytes(data)
    (folder / "bad/folder.yaml").mkdir()
    os.mkfifo(folder / "bad/pipe.yaml")
    (folder / "bad/half.jsonl").write_text('{"text": "a"}\n{"text": ')
    (folder / "bad/list.jsonl").write_text("[1]\n")
    (folder / "bad/other.jsonl").write_text('{"body": "a"}\n')
    (folder / "bad/packed.gz").write_text("not packed")
    (folder / "bad/empty.txt").write_text("")
    (folder / "bad/blank.txt").write_text(" \n\n")


def _run(kind):
    """`KIND.yaml`, and `KIND/run` with two checkpoints and their records."""
    source = {"type": "text_files", "train": "train.txt", "validation": "validation.txt", "documents": "line"}
    model = {"type": f"{kind}_lm", "depth": 1}
    Path(runs.write(".", model=model, data={"source": source}, train={"steps": 4})).rename(f"{kind}.yaml")
    made, folder = modelling.with_masking(config.load(f"{kind}.yaml")), f"{kind}/run"
    tokenizer = Tokenizer.train(iter(Path("train.txt").read_text().splitlines()), runs.VOCABULARY)
    run_directory.claim(folder, made)
    with run_directory.begun(folder, made, tokenizer.fingerprint):
        tokenizer.save(f"{folder}/{tokenizer.file}")
    weights = {w.path: w.value for w in modelling.make_model(made).weights}
    for step in STEPS:
        Checkpoints(f"{folder}/checkpoints").save(weights, {"step": step, "tokenizer": tokenizer.fingerprint})
    records = [{"step": step, "loss": 4.6, "gradient_norm": 1.0, "tokens_per_second": 9.0} for step in range(1, 5)]
    Path(folder, run_directory.METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    Path(folder, run_directory.EVALUATIONS).write_text(json.dumps({"step": 4, "loss": 4.6}) + "\n")


def damage(folder: Path, file: str, how: str) -> None:
    """Damages a file of `folder/causal/run`."""
    path = folder / "causal/run" / file
    data = path.read_bytes()
    path.unlink()
    path.mkdir() if DAMAGE[how] is None else path.write_bytes(DAMAGE[how](data))


def snapshot(folder: Path) -> dict:
    """Every file with its content, and every folder."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def copy(folder: Path, to: Path) -> Path:
    """A copy of the folder, pipes included."""
    return Path(shutil.copytree(folder, to, copy_function=_copied))


def _copied(path, to):
    return shutil.copy2(path, to) if Path(path).is_file() else os.mkfifo(to)
