"""A term is linked to the glossary where a page first uses it, and nowhere else."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest

from minillm.course.glossary import EVERYDAY, link_first_uses, link_glossary, terms

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
GLOSSARY = (NOTEBOOKS / "GLOSSARY.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[([^\]]*)\]\(G\)")


def linked(*texts: str) -> list[str]:
    return link_first_uses(texts, GLOSSARY, "G")


def test_a_row_explains_each_of_its_spellings():
    rows = terms(GLOSSARY)
    assert {"grouped-query attention", "GQA", "p50", "p99", "percentile", "MBU", "KV cache", "block table"} <= set(rows)
    assert rows["GQA"] == rows["grouped-query attention"] and rows["p50"] == rows["p99"]
    assert set(EVERYDAY) <= set(rows) and "term" not in rows


@pytest.mark.parametrize(("text", "want"), [
    ("A block, and a block.", "A [block](G), and a block."),
    ("Each block table holds a block.", "Each [block table](G) holds a [block](G)."),
    ("Continuous\nbatching and continuous batching", "[Continuous\nbatching](G) and continuous batching"),
    ("GQA is grouped-query attention", "[GQA](G) is grouped-query attention"),
    ("two batches, of 3 rows", "two [batches](G), of 3 rows"),
    ("**Prefill**, then slot-steps", "**[Prefill](G)**, then [slot-steps](G)"),
])
def test_the_first_use_is_linked(text, want):
    assert linked(text) == [want]


@pytest.mark.parametrize("text", [
    "# A block table", "`block`", "```\nblock\n```", "[the block](x.md)", "| block | step |", "$step$",
    "<b step>", "https://example.org/step", "blocked, footstep, step-wise", "all the year round, at scale", "gqa",
])
def test_what_is_no_use_of_a_term_stays(text):
    assert linked(text) == [text]


def test_a_cell_that_used_it_counts_for_those_after_it():
    assert linked("`step`", "a step", "a step") == ["`step`", "a [step](G)", "a step"]


def test_a_page_that_has_its_links_gets_no_second_ones():
    once = linked("A block table, two batches.", "Steps of GQA: acceptance rates, batches and a step. Decodes.",
                  "An acceptance rate of a block table, decode, batch")
    assert linked(*once) == once and len(LINK.findall(" ".join(once))) == 6


# -- the pages as they are stored ------------------------------------------------------------------

PAGES = sorted([*NOTEBOOKS.glob("*.ipynb"), *ROOT.glob("exercises/*.ipynb"), *ROOT.glob("exercises/solutions/*.ipynb")])


def texts_of(page: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(page, as_version=4).cells if cell.cell_type == "markdown"]


def address_from(page: Path) -> str:
    return Path(os.path.relpath(NOTEBOOKS / "GLOSSARY.md", page.parent)).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_first_use_of_each_term_on_a_page_is_linked_and_no_later_one(page):
    texts, address = texts_of(page), address_from(page)
    link = re.compile(rf"\[([^\]]*)\]\({re.escape(address)}\)")
    words = [word for text in texts for word in link.findall(text)]
    bare = [link.sub(r"\1", text) for text in texts]
    assert link_first_uses(bare, GLOSSARY, address) == texts, "run: python notebooks/build.py, or exercises/build.py"
    rows = [row_of(word) for word in words]
    assert rows and len(set(rows)) == len(rows)


def row_of(word: str) -> str:
    """The row of the glossary that explains a word, as it is spelled on a page."""
    known = {spelling.lower(): row for spelling, row in terms(GLOSSARY).items()}
    word = " ".join(word.lower().split())
    return next(known[word.removesuffix(end)] for end in ("", "s", "es") if word.removesuffix(end) in known)


def test_a_page_gets_its_links_in_its_markdown_cells():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text) for text in ("# Page", "A block.")])
    link_glossary(notebook, "GLOSSARY.md")
    assert [cell.source for cell in notebook.cells] == ["# Page", "A [block](GLOSSARY.md)."]


def test_the_sources_carry_no_links_to_the_glossary():
    """They are put in when a page is made, so that a source reads as it was written."""
    sources = [*NOTEBOOKS.glob("src/*.py"), *ROOT.glob("exercises/src/*.py")]
    assert sources and not [path.name for path in sources if "GLOSSARY.md)" in path.read_text(encoding="utf-8")]
