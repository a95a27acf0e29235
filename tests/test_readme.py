"""The README shows what was measured, and only that."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("readme", ROOT / "notebooks" / "readme.py")
readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme)
TEXT = (ROOT / "README.md").read_text()


def test_its_tables_are_those_of_the_measurement_files():
    assert readme.with_tables(TEXT) == TEXT, "run `make readme`"
    assert TEXT.count("<!-- end -->") == len(readme.TABLES) + 1, "the tables, and the claims"


def test_a_number_typed_into_a_table_is_found():
    line = next(line for line in TEXT.splitlines() if "paged KV" in line)
    assert readme.with_tables(TEXT.replace(line, line.replace("4", "5", 1))) == TEXT


def test_every_claim_has_its_line_and_a_verdict_typed_over_is_found():
    from minillm.course.ledger import LEDGER
    from minillm.course.verdicts import HOLDS, NOT_HERE, NOT_MEASURED

    table = TEXT[TEXT.index("<!-- claims -->") :].splitlines()
    for claim in LEDGER:
        (line, *_) = [line for line in table if line.startswith(f"| {claim.id} |")]
        verdict = next(word for word in (HOLDS, NOT_HERE, NOT_MEASURED) if f"| {word}" in line)
        other = line.replace(f"| {verdict}", f"| {NOT_HERE if verdict == HOLDS else HOLDS}")
        assert readme.with_tables(TEXT.replace(line, other)) == TEXT
