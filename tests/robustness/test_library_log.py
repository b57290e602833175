"""The log of libraries is a file of this user alone, and nothing in its place hangs or ends a command."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flash_tf import cli, config
from flash_tf.library_log import LibraryLog

ROOT = Path(__file__).parents[2]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def shout(line):
    """As a library in C++ does."""
    os.write(2, f"{line}\n".encode())


def test_the_log_is_private_has_a_name_that_nobody_foresees_and_goes_at_the_end(temporary, capfd):
    names = set()
    for _ in range(2):
        with LibraryLog() as log:
            shout("noise")
            sys.stderr.write("noise of Python\n")
            (file,) = temporary.iterdir()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.read_text() == "noise\nnoise of Python\n"
            names.add(file.name)
            log.progress().line("ours")
        assert not list(temporary.iterdir())
    assert len(names) == 2 and capfd.readouterr().err == "ours\nours\n"
    with LibraryLog() as log:
        shout("noise")
        kept = log.keep()
    assert Path(kept).read_text() == "noise\n"


def test_the_log_moves_with_what_is_in_it(temporary, tmp_path):
    there = tmp_path / "log.txt"
    there.write_text("of the last start\n")
    with LibraryLog() as log:
        shout("before")
        log.move(str(there))
        shout("after")
        assert log.keep() == str(there) and not list(temporary.iterdir())
    assert there.read_text() == "of the last start\nbefore\nafter\n"


def linked(path):
    (path.parent / "mine").write_text("mine\n")
    path.symlink_to(path.parent / "mine")


IN_ITS_PLACE = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link": linked,
    "a device": lambda path: path.symlink_to("/dev/full"),
}


@pytest.mark.parametrize("what", IN_ITS_PLACE)
def test_what_is_in_the_place_of_a_runs_log_is_left_alone_and_a_line_says_where_the_log_is(
    temporary, tmp_path, capfd, what
):
    there = tmp_path / "log.txt"
    IN_ITS_PLACE[what](there)
    with LibraryLog() as log:
        log.move(str(there))
        shout("noise")
    (kept,) = temporary.iterdir()
    assert kept.read_text() == "noise\n"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{there} needs to be a file, got: ") and line.endswith(f"; libraries write to {kept}")
    assert what != "a link" or there.read_text() == "mine\n"


def test_a_command_goes_on_where_no_temporary_folder_can_be_written(monkeypatch, capfd):
    def refuse(**_):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with LibraryLog() as log:
        shout("noise")
        log.progress().line("ours")
    assert capfd.readouterr().err == "ours\n"


def test_a_command_leaves_a_log_where_its_line_names_it_and_else_none(temporary, tmp_path, monkeypatch, capfd):
    os.mkfifo(temporary / f"flash-tf-{os.getuid()}.log")  # no name that anyone foresees is opened
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setattr(cli, "_keep_programs", lambda: None)
    assert cli.main(["list"]) == 0
    assert cli.main(["describe", "quickstrat"]) == 1
    assert len(list(temporary.iterdir())) == 1
    assert len(capfd.readouterr().err.splitlines()) == 1

    def fail(config, overrides):
        raise RuntimeError("broken")

    monkeypatch.setattr(config, "load", fail)
    assert cli.main(["describe", "quickstart"]) == 1
    (log,) = (path for path in temporary.iterdir() if path.is_file())
    assert capfd.readouterr().err.endswith(f"the details are in {log}\n") and "RuntimeError: broken" in log.read_text()


@pytest.mark.parametrize("script", ["install", "install_tpu", "tpu_check"])
def test_scripts_log_to_a_file_that_mktemp_makes(script):
    text = (ROOT / "scripts" / f"{script}.sh").read_text()
    assert "log=$(mktemp " in text and "id -u" not in text


def test_a_failed_installation_says_where_its_log_is(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "temporary").mkdir()
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    python.chmod(0o755)
    (tmp_path / "venv/bin/flash-tf").write_text("")
    (tmp_path / "venv/bin/flash-tf").chmod(0o755)
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        (tmp_path / "bin" / name).write_text(
            "#!/bin/sh\ncase $* in *venv\\ --clear*) exit 1;; *print*) echo 3.12;; esac\n"
        )
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TMPDIR": f"{tmp_path}/temporary"}
    asked = ["sh", str(ROOT / "scripts/install.sh"), str(tmp_path / "venv"), "."]
    done = subprocess.run(asked, env=environment, cwd=tmp_path, capture_output=True, text=True)
    (log,) = (tmp_path / "temporary").iterdir()
    assert done.returncode == 1 and f"the installation failed; see {log}" in done.stderr
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_programs_are_kept_by_the_options_of_xla_and_old_ones_of_all_options_go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = []
    for options in ("", "--xla_gpu_autotune_level=3", ""):
        monkeypatch.setenv("XLA_FLAGS", options)
        monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit")
        cli._keep_programs()
        first, ours, kinds = os.environ["TF_XLA_FLAGS"].split()
        assert (first, kinds) == ("--tf_xla_cpu_global_jit", "--tf_xla_persistent_cache_device_types=GPU")
        folders.append(Path(ours.partition("=")[2]))
    assert folders[0] == folders[2] != folders[1] and folders[1].parent == folders[0].parent
    old, new = folders[1] / "xla_compile_cache__old", folders[1] / "xla_compile_cache__new"
    for program in (old, new):
        program.touch()
    os.utime(old, (0, 0))
    monkeypatch.delenv("TF_XLA_FLAGS")
    cli._keep_programs()
    assert new.exists() and not old.exists()


@pytest.mark.parametrize(("given", "then"), [(None, "true"), ("false", "false")])
def test_a_command_takes_the_memory_of_a_gpu_as_it_needs_it_unless_told_otherwise(monkeypatch, capfd, given, then):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", given or "")
    if given is None:
        monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH")
    monkeypatch.setattr(cli, "_keep_programs", lambda: None)
    assert cli.main(["list"]) == 0 and "mlm_c4/flash" in capfd.readouterr().out
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == then


def test_a_full_disk_is_not_taken_for_too_little_memory():
    tf = pytest.importorskip("tensorflow")
    at = "{{function_node __wrapped__SaveV2_device_/job:localhost/device:CPU:0}} "
    for text, said in (
        (
            f"{at}/out/variables/part; No space left on device [Op:SaveV2]",
            "No space left on device: /out/variables/part",
        ),
        (f"{at}OOM when allocating tensor with shape[9,9] [Op:Mul]", "the memory here is too small"),
    ):
        with LibraryLog() as log:
            status, line = cli._explain(tf.errors.ResourceExhaustedError(None, None, text), log)
        assert status == 1 and line.startswith(said)


def test_a_gpu_that_another_program_has_filled_is_no_file_and_no_fault_of_ours():
    tf = pytest.importorskip("tensorflow")
    inside = "DNN library initialization failed. [[{{node while/replica_1/Call}}]] [Op:__run_3]"
    for error, said in (
        (tf.errors.InternalError(None, None, "cudaSetDevice() on GPU:0 failed. Status: out of memory"), "another"),
        (tf.errors.FailedPreconditionError(None, None, f"Graph execution error: {inside}"), "cuDNN did not start"),
    ):
        with LibraryLog() as log:
            status, line = cli._explain(error, log)
        assert status == 1 and line.startswith(said) and "nvidia-smi" in line
