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
    assert TEXT.count("<!-- end -->") == len(readme.TABLES)


def test_a_number_typed_into_a_table_is_found():
    line = next(line for line in TEXT.splitlines() if "paged KV" in line)
    assert readme.with_tables(TEXT.replace(line, line.replace("4", "5", 1))) == TEXT


def test_the_files_and_folders_it_names_exist():
    """Every path in the map of the house, and every picture."""
    import re

    for link in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / link).exists(), link
