"""Faults can be planted in the source as it is. `make test-faults` plants them."""

from pathlib import Path

import pytest

from tests.planted_faults import ROOT, read_faults

pytestmark = pytest.mark.one_backend
FAULTS = read_faults()


def test_each_fault_changes_text_that_stands_in_its_file_once():
    found = {fault.name: (ROOT / fault.file).read_text().count(fault.old) for fault in FAULTS}
    assert {name: count for name, count in found.items() if count != 1} == {}
    assert [fault.name for fault in FAULTS if fault.old == fault.new] == []


def test_there_are_sixty_faults_or_more_each_with_a_name_and_tests_of_its_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60
    named = {word for fault in FAULTS for word in fault.tests.split() if word.endswith(".py")}
    assert [name for name in named if not Path(ROOT, name).is_file()] == []


def test_the_page_names_faults_that_there_are_and_none_survived():
    lines = (ROOT / "docs/planted_faults.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ") and " | `" in line]
    assert {row[0].removeprefix("| ") for row in rows} <= {fault.name for fault in FAULTS}
    assert "**survived**" not in "".join(lines)
