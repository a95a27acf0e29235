"""A term is linked to the glossary where a page first uses it, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from minillm.course.glossary import EVERYDAY, link_first_uses, terms

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
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


@pytest.mark.parametrize("page", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda page: page.stem)
def test_on_a_page_no_row_is_linked_twice_and_nothing_else_is_changed(page):
    texts = [cell.source for cell in nbformat.read(page, as_version=4).cells if cell.cell_type == "markdown"]
    texts = [text.replace("](G)", "](g)") for text in texts]
    found = linked(*texts)
    assert [LINK.sub(r"\1", text) for text in found] == texts
    rows, words = terms(GLOSSARY), [word for text in found for word in LINK.findall(text)]
    known = {spelling.lower(): row for spelling, row in rows.items()}

    def row(word: str) -> str:
        word = " ".join(word.lower().split())
        return next(known[word.removesuffix(end)] for end in ("", "s", "es") if word.removesuffix(end) in known)

    assert linked(*found) == found
    assert words and len({row(word) for word in words}) == len(words)
