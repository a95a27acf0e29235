"""Pages for people show what was measured and computed, and only that."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("readme", ROOT / "notebooks" / "readme.py")
readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme)
README, CLAIMS, *_ = (page.read_text(encoding="utf-8") for page in readme.PAGES)


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_its_blocks_are_those_of_the_measurement_files(page):
    text = page.read_text(encoding="utf-8")
    assert readme.with_blocks(text) == text, "run `make readme`"
    assert [name for name in readme.BLOCKS if f"<!-- {name} -->\n" in text] == list(readme.PAGES[page])


def test_a_number_typed_into_a_table_is_found():
    line = next(line for line in README.splitlines() if line.startswith("4 paged KV"))
    digit = next(letter for letter in line[1:] if letter.isdigit())
    typed = line[0] + line[1:].replace(digit, str((int(digit) + 1) % 10), 1)
    assert typed != line and readme.with_blocks(README.replace(line, typed)) == README


@pytest.mark.parametrize("page", [page for page in readme.PAGES if page.name == "INSTRUCTOR.md"])
def test_a_minute_typed_into_a_timetable_is_found(page):
    text = page.read_text(encoding="utf-8")
    typed = text.replace("| 40 |", "| 30 |", 1)
    assert typed != text and readme.with_blocks(typed) == text


def test_every_claim_has_its_line_and_a_verdict_typed_over_is_found():
    from minillm.course.ledger import LEDGER
    from minillm.course.verdicts import words

    known = [words.HOLDS, words.IN_DIRECTION, words.OTHER_REASON, words.NOT_HERE, words.INCONCLUSIVE, words.TOO_SMALL,
             words.NOT_MEASURED]
    table = CLAIMS.splitlines()
    for claim in LEDGER:
        (line, *_) = [line for line in table if line.startswith(f"| {claim.id} |")]
        verdict = next(word for word in known if f"| {word} |" in line)
        other = line.replace(f"| {verdict} |", f"| {words.NOT_HERE if verdict == words.HOLDS else words.HOLDS} |")
        assert readme.with_blocks(CLAIMS.replace(line, other)) == CLAIMS


def test_a_gpu_is_named_as_soon_as_it_has_recorded_something(monkeypatch):
    assert ("No GPU run is recorded yet." in README) == (readme.gpus() == "No GPU run is recorded yet.")
    monkeypatch.setattr(readme, "on_gpu", lambda run: run.experiment == "ladder")
    assert readme.gpus().startswith("Recorded on GPUs: ") and readme.gpus().endswith(": ladder.")


def test_the_readme_stays_short():
    """150 lines with the tables of one device; what is recorded on others lengthens the blocks alone."""
    written = re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", "", README, flags=re.DOTALL)
    assert len(written.splitlines()) <= 120
