"""Plants small faults in the source, one at a time in a copy, and names the test of the default tier that catches each.

Run `python tests/planted_faults.py`, or `make test-faults`, which also writes the table of the documentation. The
faults are in `planted_faults.toml`.
"""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
LONGEST = 1800  # seconds; a test that runs longer has failed, since some faults end no loop
HEADER = """# Planted faults

Tests are worth what they catch. `make test-faults` plants each fault below in a copy of the source, alone, and runs the
default tier's tests of that part until one fails. Each test below passes on the source as it is.
"""


@dataclass(frozen=True)
class Fault:
    """The text `new` in place of `old` in `file`; `tests` are the arguments of pytest that should catch it."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: str


def read_faults():
    """All faults of `planted_faults.toml`."""
    areas = tomllib.loads(FAULTS.read_text())
    return [Fault(area, **fault) for area, group in areas.items() for fault in group]


class FirstFailure:
    """A plugin of pytest that keeps the name of the first test that failed, and how many passed."""

    test, passed = None, 0

    def pytest_collectreport(self, report):
        self._keep(report)

    def pytest_runtest_logreport(self, report):
        self._keep(report)
        self.passed += report.when == "call" and report.passed

    def _keep(self, report):
        if report.failed and self.test is None:
            self.test = report.nodeid


def run_tests(arguments, fault=None):
    """Runs tests in a copy of the source, with `fault` in it if there is one.

    Args:
      arguments: Of pytest, a list.
      fault: What to plant.

    Returns:
      The first test that failed or None, how many passed, and the end of what pytest printed.
    """
    with tempfile.TemporaryDirectory(prefix="planted-fault-") as folder:
        tree, scratch, found, printed = (
            Path(folder, name) for name in ("tree", "scratch", "found.json", "printed.txt")
        )
        copy_source(tree)
        if fault is not None:
            plant(fault, tree)
        child = os.fork()
        if child == 0:
            _be_pytest([f"--basetemp={scratch}", *arguments], tree, found, printed)
        os.waitpid(child, 0)
        end = printed.read_text()[-3000:]
        return (*(json.loads(found.read_text()) if found.exists() else ("the process died", 0)), end)


def copy_source(tree):
    """Copies the files that git knows, or would, into the folder `tree`."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)


def plant(fault, tree):
    """Puts the fault's new text in place of the old one, which must be there once."""
    path = tree / fault.file
    before, after = path.read_text().split(fault.old)  # of more or fewer parts: the fault is out of date
    path.write_text(before + fault.new + after)


def _be_pytest(arguments, tree, found, printed):
    """Runs pytest in this process, which was forked for it, and ends the process."""
    try:
        output = os.open(printed, os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(LONGEST)
        os.chdir(tree)
        sys.path[0] = str(tree)
        sys.dont_write_bytecode = True
        assert Path(importlib.util.find_spec("flash_tf").origin).is_relative_to(tree)
        import pytest

        first = FirstFailure()
        options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not full", "--tb=short"]
        status = pytest.main([*options, *arguments], plugins=[first])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and first.test is None:
            first.test = f"pytest: {pytest.ExitCode(status).name}"
        found.write_text(json.dumps([first.test, first.passed]))
    except BaseException:  # the parent's code must not run twice
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _too_long(*_):
    raise TimeoutError(f"ran longer than {LONGEST} s")


def try_fault(fault):
    """The fault, the test that catches it or None, the seconds that this took, and the end of what pytest printed."""
    start = time.monotonic()
    test, _, end = run_tests(shlex.split(fault.tests), fault)
    return fault, test, time.monotonic() - start, end


def try_unchanged(tests):
    """Why some of the tests show nothing, or None if all of them pass on the source as it is."""
    test, passed, end = run_tests(tests)
    return None if test is None and passed == len(tests) else f"{test or 'some tests'} without a fault:\n{end}"


def table(results):
    """The page of the documentation: for each area its faults, and what caught them."""
    lines = [HEADER.rstrip()]
    for area in dict.fromkeys(fault.area for fault, *_ in results):
        lines += ["", f"## {area.capitalize()}", "", "| Fault | Caught by |", "|---|---|"]
        for fault, test, *_ in results:
            if fault.area == area:
                lines.append(f"| {fault.name} | {f'`{test}`' if test else '**survived**'} |")
    survived = sum(test is None for _, test, *_ in results)
    return "\n".join([*lines, "", f"{len(results)} of {len(read_faults())} faults planted, {survived} survived.", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="plant the faults whose file or name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="how many run side by side (default: 2)")
    parser.add_argument("--write", type=Path, help="the Markdown page to write the table to")
    options = parser.parse_args()
    faults = [fault for fault in read_faults() if options.only in fault.file or options.only in fault.name]
    _import_libraries()
    results = []
    # Tests of training start child processes, which workers of a `multiprocessing.Pool` must not do.
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        for fault, test, seconds, end in pool.map(try_fault, faults):
            results.append((fault, test))
            print(f"{fault.file}: {fault.name} ({seconds:.0f} s)\n    {test or end + 'survived'}", flush=True)
        caught = sorted({test for _, test in results if test})
        parts = filter(None, (caught[i :: options.jobs] for i in range(options.jobs)))  # pytest takes none for all
        problems = list(pool.map(try_unchanged, parts))
    if any(problems):
        sys.exit("\n".join(["A test fails on the source as it is, or did not run:", *filter(None, problems)]))
    print(f"{len(results)} faults, {sum(test is None for _, test in results)} survived")
    if options.write:
        options.write.write_text(table(results))
    sys.exit(any(test is None for _, test in results))


def _import_libraries():
    """Imports what takes long and is not ours, once: each run is forked from here."""
    for name in ("numpy", "tensorflow", "tensorflow_text", "keras", "tensorflow_datasets", "pytest"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


if __name__ == "__main__":
    main()
