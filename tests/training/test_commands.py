"""The command line on good input: its output and its files."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

import flash_tf
from flash_tf import cli, commands, config
from tests.training import runs

# Everything that `train` shows.
OURS = re.compile(
    r"training a tokenizer|tokenized \d|step [\d,]+/[\d,]+  loss|step [\d,]+  validation loss|going on from step"
    r"|SIG(TERM|INT): saving|flash-tf: |done; the run is in "
)


def foreign(stderr):
    return [line for line in stderr.splitlines() if not OURS.match(line)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of a masked and of a causal run that the command trained, with what it printed."""
    found = {}
    for kind in ("masked", "causal"):
        folder = tmp_path_factory.mktemp(kind)
        runs.corpus(folder)
        path = runs.write(folder, model={"type": f"{kind}_lm", **runs.SMALLEST}, evaluation={"every": None})
        counts = "data.source.counts_words=true"
        found[kind] = folder, runs.command(folder, "train", path, "--model-dir", folder / "model", "--set", counts)
    return found


def test_train_prints_nothing_on_standard_output_and_only_its_own_lines_on_standard_error(trained):
    for folder, (status, out, err) in trained.values():
        assert (status, out, foreign(err)) == (0, "", [])
        assert err.splitlines()[-1] == f"done; the run is in {folder}/model"
        assert "train | step" in (folder / "model/log.txt").read_text()


def one_object(result):
    """The only thing on standard output, with nothing on standard error."""
    status, out, err = result
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    return json.loads(out)


def test_evaluate_prints_one_object_which_is_what_training_recorded(trained):
    figures = {"step", "loss", "perplexity", "unigram_perplexity", "tokens"}
    for kind, more in (("masked", set()), ("causal", {"word_perplexity", "words"})):
        folder, _ = trained[kind]
        found = one_object(runs.command(folder, "evaluate", folder / "model", "--json"))
        assert set(found) == figures | more
        recorded = runs.records(folder / "model", "evaluations.jsonl")
        assert recorded == [found]


def test_evaluate_without_json_prints_a_line_for_each_figure(trained):
    folder, _ = trained["causal"]
    status, out, err = runs.command(folder, "evaluate", folder / "model", "--checkpoint", "newest")
    assert (status, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()]
    assert names[:3] == ["step", "loss", "perplexity"] and "word_perplexity" in names


def test_describe_prints_one_object_and_allocates_nothing_in_the_folder(tmp_path):
    found = one_object(runs.command(tmp_path, "describe", "quickstart", "--json", "--set", "model.depth=2"))
    assert found["model"] == "masked_lm" and found["mixer"] == "flash"
    assert found["parameters"] > 4000 * 128
    assert found["training_flops_per_token"] == pytest.approx(3 * found["forward_flops_per_token"], abs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr", "stdout"]


def test_list_prints_one_object_of_names(tmp_path):
    found = one_object(runs.command(tmp_path, "list", "--json"))
    assert {"flash", "gau"} <= set(found["mixers"])
    assert {"masked_lm", "causal_lm"} <= set(found["models"])
    assert "text_files" in found["sources"] and "quickstart" in found["configs"]


def test_fill_mask_gives_the_likeliest_tokens_of_each_mask_with_falling_probabilities(trained):
    folder, _ = trained["masked"]
    word = (folder / "validation.txt").read_text().split()[0]
    text = f"{word} <mask> {word} <mask>"
    found = one_object(runs.command(folder, "fill-mask", folder / "model", text, "--top-k", "3", "--json"))["masks"]
    assert [len(mask) for mask in found] == [3, 3]
    for mask in found:
        probabilities = [candidate["probability"] for candidate in mask]
        assert probabilities == sorted(probabilities, reverse=True) and 0 < sum(probabilities) < 1
        assert all(candidate["text"].startswith(word) for candidate in mask)
    texts = text, f"<mask> {word}"
    status, out, _ = runs.command(folder, "fill-mask", folder / "model", *texts, "--top-k", "3")
    lines = out.splitlines()
    assert status == 0 and (lines[0], lines[3]) == texts and len(lines) == 5
    best = [f"{c['token'].lstrip('▁')} {c['probability']:.1%}" for c in found[1]]
    assert lines[2].split("   ") == ["", " " + best[0], *best[1:]]


def fresh(*arguments):
    """Runs `flash-tf` in a new interpreter: status, outputs, and whether it imported TensorFlow or Keras."""
    program = (
        "import sys; from flash_tf import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "finally: print({'tensorflow', 'keras'} & set(sys.modules), file=sys.stderr)"
    )
    environment = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


def test_help_lists_every_command_with_its_purpose_in_one_line_without_importing_tensorflow():
    before = os.times()
    status, out, err = fresh("--help")
    after = os.times()
    assert (status, err) == (0, "set()\n")
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2
    lines = out.splitlines()
    for name in commands.NAMES:
        assert sum(re.match(rf"    {name} +[A-Z]\S* \S", line) is not None for line in lines) == 1, name
    assert max(map(len, lines)) <= 80


def test_version_is_the_package_version():
    assert fresh("--version") == (0, f"flash-tf {flash_tf.__version__}\n", "set()\n")


@pytest.mark.parametrize("name", commands.NAMES)
def test_help_of_a_command_has_a_purpose_groups_and_two_examples_that_parse(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    usage, purpose, *groups, examples = text.strip().split("\n\n")
    assert usage.startswith(f"usage: flash-tf {name} ") and re.fullmatch(r"[A-Z].*\.", purpose)
    titles = [group.split("\n")[0] for group in groups if not group.startswith("  ")]
    assert titles[0] == "options:" and len(groups[0].splitlines()) == 2 and len(titles) > 1  # the rest is in groups
    assert max(map(len, text.splitlines())) <= 80
    title, *lines = examples.splitlines()
    assert title == "examples:" and len(lines) == 2
    for line in lines:
        program, *arguments = shlex.split(line)
        parsed = cli._parser().parse_args(arguments)
        assert (program, arguments[0]) == ("flash-tf", name)
        known = getattr(parsed, "config", "quickstart")
        assert known in config.names() or known.endswith(".yaml") or known.startswith("runs/")


def on_terminal(folder, columns, *arguments):
    """Runs `flash-tf` on a terminal of its own; status and what it wrote, line by line as it was drawn."""
    process, terminal = pty.fork()
    if process == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.chdir(folder)
        os.execv(sys.executable, [sys.executable, "-m", "flash_tf.cli", *map(str, arguments)])
    written = b""
    with contextlib.suppress(OSError):  # the end of the process
        while part := os.read(terminal, 65536):
            written += part
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), written.decode().replace("\r\n", "\n")


@pytest.mark.full
@pytest.mark.parametrize("columns", [50, 80])
def test_training_on_a_terminal_draws_lines_that_fit_and_leaves_a_history(tmp_path, columns, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(flash_tf.__file__).parents[1]))
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, model={"depth": 1}, train={"steps": 40}, evaluation={"every": 20})
    status, written = on_terminal(tmp_path, columns, "train", path, "--model-dir", "model")
    assert status == 0, written
    drawn = [line for line in re.split(r"\n|\r\033\[K", written) if line]
    assert max(len(line) for line in drawn if line.startswith(("step", "evaluated", "tokenized"))) < columns
    steps = [int(line.split()[1].partition("/")[0]) for line in drawn if "  loss " in line]
    assert steps == list(range(1, 41))
    stay = [line.rpartition("\r\033[K")[2] for line in written.split("\n") if line]
    assert [line.split()[1] for line in stay if "  loss " in line] == [f"{n}/40" for n in range(2, 41, 2)]
    assert [line.split()[1] for line in stay if "validation loss" in line] == ["20", "40"]
    assert stay[-1] == "done; the run is in model"


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, "the command ended by itself"
        time.sleep(0.05)


def interrupted(folder, number, *, after):
    """Starts `flash-tf train` in a new process and signals it after some steps. Returns status and outputs."""
    metrics = folder / "model/metrics.jsonl"
    arguments = ["train", str(folder / "config.yaml"), "--model-dir", str(folder / "model")]
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        process = subprocess.Popen([sys.executable, "-m", "flash_tf.cli", *arguments], stdout=out, stderr=err)
        try:
            wait_for(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= after, process)
            process.send_signal(number)
            process.wait()
        finally:
            process.kill()
    return process.returncode, Path(out.name).read_text(), Path(err.name).read_text()


@pytest.mark.full
def test_a_signal_saves_and_ends_with_128_plus_its_number_and_the_same_command_goes_on(tmp_path):
    runs.corpus(tmp_path)
    train = {"steps": 10**6, "steps_per_loop": 5, "checkpoint_every": 10**6}
    runs.write(tmp_path, model={"depth": 1}, train=train, evaluation={"every": None})
    status, out, err = interrupted(tmp_path, signal.SIGTERM, after=5)
    assert (status, out, foreign(err)) == (143, "", [])
    assert "SIGTERM: saving after this loop of steps" in err.splitlines()
    assert err.splitlines()[-1] == "flash-tf: stopped by SIGTERM; the same command goes on from here"
    steps = len(runs.losses(tmp_path / "model"))
    assert [int(name.name[5:]) for name in (tmp_path / "model/checkpoints").iterdir()] == [steps]
    noise = (tmp_path / "model/log.txt").read_text()
    assert "Interrupted" in noise and "train | step" in noise

    status, out, err = interrupted(tmp_path, signal.SIGINT, after=steps + 5)
    assert (status, out, foreign(err)) == (130, "", [])
    assert f"going on from step {steps:,}" in err.splitlines()
    assert err.splitlines()[-1] == "flash-tf: stopped by SIGINT; the same command goes on from here"
    assert len(runs.losses(tmp_path / "model")) >= steps + 5


@pytest.mark.full
def test_a_run_that_goes_on_finds_the_programs_that_xla_kept(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    kept = f"--tf_xla_persistent_cache_directory={cache} --tf_xla_persistent_cache_device_types=CPU"
    monkeypatch.setenv("TF_XLA_FLAGS", kept)
    runs.corpus(tmp_path)
    train = {"steps": 10**6, "steps_per_loop": 10, "checkpoint_every": 10**6, "jit_compile": True}
    runs.write(tmp_path, model={"depth": 1}, train=train, evaluation={"every": 200})
    assert interrupted(tmp_path, signal.SIGTERM, after=210)[0] == 143
    programs = set(cache.iterdir())
    assert len(programs) == 2  # of steps and of evaluation
    assert interrupted(tmp_path, signal.SIGTERM, after=410)[0] == 143
    assert set(cache.iterdir()) == programs
    runs.write(tmp_path, model={"depth": 1}, train={**train, "deterministic": True}, evaluation={"every": 200})
    shutil.rmtree(tmp_path / "model")
    assert interrupted(tmp_path, signal.SIGTERM, after=210)[0] == 143
    assert len(set(cache.iterdir()) - programs) == 2  # others, although the graphs are the same


@pytest.mark.full
def test_a_command_leaves_no_file_of_autograph_in_the_temporary_folder(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, train={"steps": 1})
    (tmp_path / "temporary").mkdir()
    code = f"import sys; sys.argv = ['flash-tf', 'train', {path!r}, '--model-dir', {str(tmp_path / 'run')!r}]\n"
    code += "from flash_tf.cli import program; program()"
    given = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    assert subprocess.run([sys.executable, "-c", code], env=given, capture_output=True).returncode == 0
    assert not list((tmp_path / "temporary").glob("__autograph_generated_file*"))
