"""Bad input to every command: a status, one line with the need and the finding, soon, and nothing changed on disk."""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import resource
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from flash_tf import cli, commands, config
from flash_tf.layers.mixers import MIXERS
from flash_tf.models import MODELS
from tests.robustness import bad_folders
from tests.tiers import thinned

TABLE = Path(__file__).with_name("bad_inputs.txt")
SECONDS = 10  # of a processor, for a command from its start to its end
INSIDE = re.compile(r"\w(Error|Exception)\b|Traceback|{{|\[Op:|tensorflow\.|keras\.src|<class|should not")
FLASH_TF = Path(sys.executable).with_name("flash-tf")

# What every option of a kind refuses, as YAML.
NEVER = {
    int: (".nan", "1.5", "many", "99999999999999999999", "1:30", "[1]"),
    float: (".nan", "-.inf", "1.0e+300", "much", "{a: 1}"),
    bool: ("3", "maybe"),
    str: ("3", "[a]"),
    dict: ("3", "[1, 2]"),
    list: ("3", "{a: 1}"),
}
TAKE_CONFIGS = (  # by turns
    "train masked.yaml --model-dir m",
    "describe masked.yaml",
    "compile masked.yaml --out o",
    "profile masked.yaml",
    "tune masked.yaml",
)
# Files of a run, what may become of them, and the commands that then cannot work.
ANY = tuple(bad_folders.DAMAGE)
READERS = ("evaluate", "average", "generate --prompt a", "score train.txt", "inspect --text a")
DAMAGED = {
    "config.yaml": ([how for how in ANY if how != "cut"], (*READERS, "export o", "convert o", "train")),
    "tokenizer.model": (ANY, (*READERS, "export o", "train")),
    "run.json": (ANY, ("train",)),
    "metrics.jsonl": (("empty", "binary", "text", "folder"), ("plot",)),
    "checkpoints/step-00000004/complete.json": (ANY[:-1], ("evaluate --checkpoint 4",)),
    "checkpoints/step-00000004/variables.index": (ANY[:-1], ("evaluate --checkpoint 4",)),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A command, its status, and a part of what it must say; `damage` is a file of a run and what becomes of it."""

    command: str
    status: int
    said: str
    damage: tuple[str, str] | None = None

    @property
    def name(self):
        return next((word for word in self.command.split() if word in commands.NAMES), "none")


def table():
    for line in TABLE.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            head, _, said = line.partition(" => ")
            status, _, command = head.partition(" ")
            yield Entry(command, int(status), said)


def options():
    """Every option of a config and of its model and mixer, with values of no use to it."""
    turn = 0
    model = {"model": MODELS.get("masked_lm").__init__, "model.mixer": MIXERS.get("flash").__init__}
    for section, cls in {**_sections(config.Config, ""), **model}.items():
        for name, annotation in typing.get_type_hints(cls).items():
            for value in _never(annotation) if name not in ("kwargs", "return") else ():
                override = shlex.quote(f"{section}.{name}={value}".removeprefix("."))
                yield Entry(f"{TAKE_CONFIGS[turn % len(TAKE_CONFIGS)]} --set {override}", 1, name)
                turn += 1


def _sections(cls, path):
    """The dataclasses of a config by their places."""
    found = {}
    for name, annotation in typing.get_type_hints(cls).items():
        inner = next((one for one in (annotation, *typing.get_args(annotation)) if dataclasses.is_dataclass(one)), None)
        if inner is not None and name != "tokenizer":  # which may also be a path
            place = f"{path}.{name}".removeprefix(".")
            found |= {place: inner, **_sections(inner, place)}
    return found


def _never(annotation):
    kinds = {typing.get_origin(one) or one for one in (typing.get_args(annotation) or (annotation,))}
    if typing.get_origin(annotation) in (list, tuple, dict):
        kinds = {typing.get_origin(annotation)}
    kinds = {list if kind is tuple else kind for kind in kinds} - {type(None)}
    return NEVER.get(kinds.pop(), ()) if len(kinds) == 1 else ()


def damaged():
    for file, (ways, of) in DAMAGED.items():
        for how in ways:
            for command in of:
                name, _, rest = command.partition(" ")
                said = "step-00000004" if "checkpoints" in file else file.partition(".")[0]
                yield Entry(f"{name} causal/run {rest}".strip(), 1, said, (file, how))


ENTRIES = [*table(), *options(), *damaged()]
SHARES = 24  # of the entries, and each is tried alone; a process for each entry would take an hour


def check(entry, status, out, err):
    """What is wrong with an answer; None if nothing is."""
    line = err.removeprefix("flash-tf: ").removesuffix("\n")
    if status != entry.status or out or line == err or "\n" in line:
        return f"{entry}: {status} {out!r} {err!r}"
    return None if entry.said in line and not INSIDE.search(line) else f"{entry}: {err!r}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad") / "folder"
    folder.mkdir()
    bad_folders.make(folder)
    return folder


@contextlib.contextmanager
def copied(folder, to, entry):
    """A copy of the folder for an entry. Nothing in it may change."""
    copy = bad_folders.copy(folder, to)
    if entry.damage:
        bad_folders.damage(copy, *entry.damage)
    before = bad_folders.snapshot(copy)
    yield copy
    after = bad_folders.snapshot(copy)
    changed = sorted(name for name in {*before, *after} if before.get(name, 0) != after.get(name, 0))
    assert not changed, f"{entry} changed {changed}"


def test_the_table_has_every_command_and_four_hundred_entries():
    assert {entry.name for entry in ENTRIES} == {*commands.NAMES, "none"}
    assert len(list(table())) >= 400 and len(ENTRIES) == len(set(ENTRIES)) >= 750


@pytest.mark.one_backend
@pytest.mark.parametrize("share", thinned(range(SHARES), 0))
def test_every_entry_is_refused_in_one_line_and_changes_nothing(folder, tmp_path, monkeypatch, capfd, share):
    found = []
    for number, entry in enumerate(ENTRIES[share::SHARES]):
        with copied(folder, tmp_path / str(number), entry) as copy:
            monkeypatch.chdir(copy)
            try:
                status = cli.main(shlex.split(entry.command))
            except SystemExit as end:
                status = end.code
        found.append(check(entry, status, *capfd.readouterr()))
    assert [one for one in found if one] == []


@pytest.mark.one_backend
def test_describe_names_in_one_line_what_training_needs_and_the_machine_lacks(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    lacking = {
        "data.source.validation=none.txt": "source 'text_files' needs files for validation, but 'none.txt'",
        "data.tokenizer=none.model": "tokenizer model none.model cannot be read",
        "init_from=none": "init_from needs a run or a preset, and none is neither",
        "strategy={type: mirrored, devices: ['GPU:7']}": "strategy.devices 'GPU:7' is not there",
        "model.width=2000000": "the weights and the optimizer need",
    }
    assert cli.main(["describe", "masked.yaml", *(part for one in lacking for part in ("--set", one))]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("model  ") and err.startswith("this machine lacks what training needs: ")
    assert err.count("\n") == 1 and all(said in err for said in lacking.values()), err


@pytest.mark.full
@pytest.mark.one_backend
@pytest.mark.parametrize("name", [*commands.NAMES, "none"])
def test_so_does_a_process_of_each_command_within_ten_seconds(folder, tmp_path, name):
    def answer(numbered):
        number, entry = numbered
        with copied(folder, tmp_path / str(number), entry) as copy:
            return check(entry, *process(copy, *shlex.split(entry.command)))

    entries = enumerate([entry for entry in ENTRIES if entry.name == name][:: SHARES // 2])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        assert [one for one in pool.map(answer, entries) if one] == []


def process(folder, *arguments, **options):
    """Status and outputs of `flash-tf` in a folder. It may use SECONDS of a processor."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))  # noqa: E731
    command = [str(FLASH_TF), *arguments]
    done = subprocess.run(command, cwd=folder, preexec_fn=limit, capture_output=True, timeout=30 * SECONDS, **options)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


STREAMS = {  # a command, its status, and the only line that it says
    "train": (2, "flash-tf: the following arguments are required: CONFIG_OR_RUN; see flash-tf train --help"),
    "describe nothing": (1, "flash-tf: no config file 'nothing', and no config of this name in the package"),
    "-V": (0, ""),
}


@pytest.mark.one_backend
@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", thinned(STREAMS, "-V"))
def test_closed_streams_change_no_status_and_get_no_file_of_the_command(tmp_path, command, closed):
    status, line = STREAMS[command]
    called = f"exec {shlex.quote(str(FLASH_TF))} {command} {closed}"
    done = subprocess.run(["sh", "-c", called], cwd=tmp_path, capture_output=True)
    assert (done.returncode, list(tmp_path.iterdir())) == (status, [])
    assert done.stderr.decode().strip() == ("" if "2>&-" in closed else line)


@pytest.mark.full
@pytest.mark.one_backend
def test_a_terminal_that_knows_ascii_alone_gets_other_characters_by_their_numbers(folder, tmp_path):
    copy = bad_folders.copy(folder, tmp_path / "copy")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "LANG": "C"}
    status, out, err = process(copy, "fill-mask", "masked/run", "\u00e4 <mask>", "--top-k", "90", env=ascii_only)
    assert (status, err) == (0, "") and out.startswith("\\xe4 <mask>")
    status, out, err = process(copy, "fill-mask", "masked/run", "\u00e4", env=ascii_only)
    assert (status, out, err) == (1, "", "flash-tf: the text needs a <mask>, got '\\xe4'\n")


@pytest.mark.full
@pytest.mark.one_backend
def test_a_full_standard_output_is_an_error(folder):
    with open("/dev/full", "w") as full:
        done = subprocess.run([FLASH_TF, "evaluate", "causal/run"], cwd=folder, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and done.stderr.decode().splitlines()[-1] == "flash-tf: No space left on device"


@pytest.mark.full
@pytest.mark.one_backend
@pytest.mark.parametrize("command", ["export causal/run out", "average causal/run --last 2 --out out"])
def test_a_disk_that_fills_leaves_the_older_folder_whole_and_ends_with_a_line(folder, tmp_path, command):
    copy, arguments = bad_folders.copy(folder, tmp_path / "copy"), command.split()
    assert subprocess.run([FLASH_TF, *arguments], cwd=copy, capture_output=True).returncode == 0
    before = bad_folders.snapshot(copy)
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))  # noqa: E731
    done = subprocess.run([FLASH_TF, *arguments], cwd=copy, preexec_fn=small, capture_output=True)
    line = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 1 and line.startswith("flash-tf: ") and not INSIDE.search(line), line
    assert re.search("File too large|cannot be written", line), line
    assert bad_folders.snapshot(copy) == before
