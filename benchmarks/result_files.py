"""The result files in benchmarks/results: one a benchmark, one line a measurement. The standard library alone.

Each line is a JSON object that stands by itself: `date`, `commit`, `device`, `command`, `versions`, then what was
measured. Lines are only ever appended. A reader takes the last line of each thing that was measured, see `newest`.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).with_name("results")

Row = dict[str, Any]


class Results:
    """Appends rows to a benchmark's file, each as soon as it is measured.

    Args:
      args: The script's arguments, with those that `add_options` and `parse` add.
      benchmark: Names the file, as in benchmarks/results/train_step.jsonl, unless `args.results` names another.
      device: The device that was timed.
      packages: The packages whose versions decide the figures.

    Attributes:
      rows: What this run measured.
      before: What the file already had of this commit, device and variant. Empty where the commit does not tell the
        code, because files differ from it or it is unknown.

    Raises:
      OSError: The file cannot be written. Nothing was timed yet.
      ValueError: The file is damaged.
    """

    def __init__(self, args: argparse.Namespace, benchmark: str, *, device: str, packages: Sequence[str]):
        self.path = Path(args.results or path_of(benchmark))
        self._about = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": args.commit or commit(),
            "device": device,
            "command": args.command,
            **({"variant": args.variant} if args.variant else {}),
            "versions": {"python": platform.python_version(), **versions(packages)},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.open("a").close()
        known = self._about["commit"] != "unknown" and not self._about["commit"].endswith("-dirty")
        same = {name: self._about.get(name) for name in ("commit", "device", "variant")}
        found = read(self.path) if known else []
        self.before = [row for row in found if all(row.get(name) == value for name, value in same.items())]
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Appends a row to the file."""
        whole = {**self._about, **row}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole, ensure_ascii=False, separators=(",", ":")) + "\n")
        self.rows.append(whole)

    def has(self, **values: Any) -> bool:
        """Whether the file already had a row with these values, of the same commit, device and variant."""
        return any(all(row.get(name) == value for name, value in values.items()) for row in self.before)


def path_of(benchmark: str) -> Path:
    """The result file of a benchmark."""
    return FOLDER / f"{benchmark}.jsonl"


def read(path: str | Path) -> list[Row]:
    """The rows of a result file, oldest first; none if there is no such file.

    Raises:
      ValueError: A line is not a JSON object with a commit and a device.
    """
    if not Path(path).exists():
        return []
    rows = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            row["commit"], row["device"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged: line {number} needs a JSON object with `commit` and `device`, got {line[:60]!r}"
            ) from error
        rows.append(row)
    return rows


def newest(rows: Iterable[Row], *names: str) -> list[Row]:
    """The last row for each combination of the values under `names`. Rows of variants are left out."""
    return list({json.dumps([row.get(name) for name in names]): row for row in rows if not row.get("variant")}.values())


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """The checked-out commit, with `-dirty` if files beside results differ from it; "unknown" outside a checkout."""
    head = _git("rev-parse", "--short=7", "HEAD")
    if not head:
        return "unknown"
    differs = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{FOLDER.relative_to(ROOT)}")
    return f"{head}-dirty" if differs else head


def _git(*arguments):
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where rows go and what they are about."""
    group = parser.add_argument_group("results")
    group.add_argument("--results", metavar="FILE", help="append rows here (default: the file in benchmarks/results)")
    group.add_argument("--commit", help="of the code (default: the checked-out commit)")
    group.add_argument("--variant", metavar="TEXT", help="what is unusual about these rows; plots and tables skip them")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds `--set` for trainings. Rows with overrides are a variant; see `variant`."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of every training; rows are then a variant"
    )


def variant(args: argparse.Namespace, *unusual: str) -> str | None:
    """What is unusual about the rows: `--variant`, or else the overrides and what else is."""
    return args.variant or ", ".join([*args.set, *unusual]) or None


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parses a script's arguments, and keeps the command itself, which each row records. Wrong ones end it."""

    def error(message):
        name = parser.prog.rpartition(".")[2]
        parser.exit(2, f"{name}: {' '.join(message.split())}; see {parser.prog} --help\n")

    parser.error = error
    args = parser.parse_args(arguments)
    args.command = shlex.join([*parser.prog.split(), *(sys.argv[1:] if arguments is None else arguments)])
    return args
