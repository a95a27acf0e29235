"""Exercise 13 takes parts from the learner's notebooks, and names the part that makes an engine wrong."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from wrong_answers import FOLDER, Solution

from minillm.course.grading import check
from minillm.course.grading.exercises import find
from minillm.course.grading.exercises.ex04_continuous_scheduler import Request
from minillm.course.grading.parts import PACKAGE, PARTS, take_parts
from minillm.course.grading.runner import Limits, grade_notebook
from minillm.course.your_engine import Request as EngineRequest
from minillm.ladder.request import SamplingParams

NAMES = tuple(part.name for part in PARTS)
NOTEBOOKS = {part.exercise for part in PARTS}


@cache
def my_engine():
    """The class that the solution's notebook defines, with the package's parts."""
    solution = Solution(find("13_your_engine"))
    return solution.answer(solution.exercise.tasks[1])


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A learner's folder in which everything is solved."""
    monkeypatch.delenv("CI", raising=False)
    for name in NOTEBOOKS:
        text = (FOLDER / "solutions" / f"{name}.ipynb").read_text(encoding="utf-8")
        (tmp_path / f"{name}.ipynb").write_text(text, encoding="utf-8")
    return tmp_path


def plant(folder: Path, exercise: str, old: str, new: str) -> None:
    """Write something else into the one code cell of a notebook that says `old`."""
    path = folder / f"{exercise}.ipynb"
    content = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code" and old in "".join(cell["source"])]
    assert len(cells) == 1, f"{old!r} stands in {len(cells)} cells"
    source = "".join(cells[0]["source"])
    assert source.count(old) == 1
    cells[0]["source"] = source.replace(old, new)
    path.write_text(json.dumps(content), encoding="utf-8")


def engine_of(folder: Path):
    """The solution's engine with the parts of a folder."""
    return type("MyEngine", (my_engine(),), {"parts": take_parts(folder)})


# -- five wrong engines, and more of their kinds -------------------------------------------------------------------

POOL, FIVE = "05_block_pool", "block pool, of exercise 5"
SCHEDULER, CACHE, ATTENTION = "04_continuous_scheduler", "02_kv_cache", "07_paged_attention"
STARVES = ("scheduler, of exercise 4", "starve a request")
LEAKS, KEEPS = (FIVE, "Does it leak"), ("block table, of exercise 5", "give all back")
MASK, FORGETS = ("paged attention, of exercise 7", "mask off by one"), ("KV cache, of exercise 2", "forget a layer")
ACCEPTS = ("verification, of exercise 9", "accept too much")
WRONG = {
    "the newest request goes first": (SCHEDULER, "self.waiting.popleft()", "self.waiting.pop()", STARVES),
    "a prompt that exceeds the budget never joins": (
        SCHEDULER, "while self.waiting and budget > 0", "while self.waiting and budget >= self.waiting[0].num_pending",
        STARVES),
    "the last request that runs is not fed": (
        SCHEDULER, "        return rows", "        return rows[:1] if rows and rows[0][1] == 1 else rows", STARVES),
    "a block is lost at each release": (POOL, "self.free.extend(blocks)", "self.free.extend(blocks[1:])", LEAKS),
    "released blocks are lost": (POOL, "        self.free.extend(blocks)\n", "", LEAKS),
    "all free blocks go to one that takes none": (
        POOL, "return [self.free.pop() for _ in range(number)]",
        "taken = self.free[-number:]; self.free = self.free[:-number]\n        return taken",
        (FIVE, "to a request that takes none")),
    "a token goes into a list that the engine's requests do not have": (
        SCHEDULER, "request.append(next_token(request))", "request.output.append(next_token(request))",
        (STARVES[0], "raised AttributeError: 'Request' object has no attribute 'output', in the line "
         "`request.output.append(next_token(request))`")),
    "a table keeps its last block": (
        POOL, "self.pool.release(self.blocks)", "self.pool.release(self.blocks[:-1])", KEEPS),
    "a token does not see itself": (ATTENTION, "> position  # [n, S]", ">= position  # [n, S]", MASK),
    "a token sees the next one": (ATTENTION, "> position  # [n, S]", "> position + 1  # [n, S]", MASK),
    "positions begin one too early": (
        ATTENTION, "torch.arange(num_tokens - n, num_tokens)[:, None]",
        "torch.arange(num_tokens - n, num_tokens)[:, None] - int(n > 1)", MASK),
    "the second layer is not kept": (CACHE, "if layer in self.keys:", "if layer in self.keys and layer != 1:", FORGETS),
    "no layer but the first is kept": (CACHE, "if layer in self.keys:", "if layer in self.keys and layer == 0:",
                                       FORGETS),
    "the last layer writes over the first": (
        CACHE, "        if layer in self.keys:", "        layer = 0\n        if layer in self.keys:", FORGETS),
    "every draft is accepted": (
        "09_speculation", "while accepted < len(drafts) and drafts[accepted] == best[accepted]",
        "while accepted < len(drafts)", ACCEPTS),
    "right drafts after a wrong one are accepted": (
        "09_speculation", "    return [*drafts[:accepted], best[accepted]]",
        "    accepted = max([i + 1 for i, d in enumerate(drafts) if d == best[i]], default=0)\n"
        "    return [*drafts[:accepted], best[accepted]]", ACCEPTS),
    "the first wrong draft is accepted": (
        "09_speculation", "    return [*drafts[:accepted], best[accepted]]",
        "    accepted = min(accepted + 1, len(drafts))\n    return [*drafts[:accepted], best[accepted]]", ACCEPTS),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_part_that_is_wrong_is_named_with_its_likely_mistake(folder, name):
    exercise, old, new, (part, mistake) = WRONG[name]
    plant(folder, exercise, old, new)
    result = check("your_engine", engine_of(folder))
    assert result.failed
    message = result.failed[0].message
    assert f"Your {part}, is at fault" in message and mistake in message and f"Look at {exercise}.ipynb" in message


def test_right_parts_pass_and_are_all_the_learners(folder):
    engine = engine_of(folder)
    assert engine.parts.own == NAMES and check("your_engine", engine).passed


def test_two_wrong_parts_are_said_to_be_several(folder):
    plant(folder, *WRONG["a token does not see itself"][:3])
    plant(folder, *WRONG["released blocks are lost"][:3])
    message = check("your_engine", engine_of(folder)).failed[0].message
    assert "Your paged attention" in message, "what one part alone explains is that part's"
    plant(folder, POOL, "* size + position % size", "* size")
    assert "Several of your parts are at fault" in check("your_engine", engine_of(folder)).failed[0].message


def test_a_wrong_step_is_not_blamed_on_a_part(folder):
    class Forgets(engine_of(folder)):
        def step(self):
            rows = self.scheduler.plan()
            self.scheduler.commit(rows, lambda request: 7)

    message = check("your_engine", Forgets).failed[0].message
    assert "at fault" not in message and "'The forward pass'" in message


def test_what_a_request_has_in_exercise_4_it_has_in_the_engine():
    names = {name for name in dir(Request("a", 3, 4)) if not name.startswith("_")} - {"wanted"}
    engine = EngineRequest(1, [5, 6], SamplingParams(max_tokens=2))
    assert not [name for name in names if not hasattr(engine, name)] and {"append", "num_pending"} <= names


# -- whose parts ---------------------------------------------------------------------------------------------------


def test_what_is_not_done_is_the_packages_and_named(folder, capsys):
    stub = (FOLDER / "05_block_pool.ipynb").read_text(encoding="utf-8")
    (folder / "05_block_pool.ipynb").write_text(stub, encoding="utf-8")
    (folder / "09_speculation.ipynb").unlink()
    (folder / "08_quantised_kv.ipynb").write_text("no notebook", encoding="utf-8")
    plant(folder, "07_paged_attention", "def paged_attention(", "def my_attention(")
    parts = take_parts(folder)
    said = capsys.readouterr().out
    assert "block pool: the package's, since exercise 5 is not done" in said
    assert "block table: the package's, since exercise 5 is not done" in said
    assert "verification: the package's, since 09_speculation.ipynb is not in this folder" in said
    assert "8-bit format: the package's, since 08_quantised_kv.ipynb could not be read: " in said
    assert "paged attention: the package's, since 07_paged_attention.ipynb defines no paged_attention" in said
    assert "scheduler: yours, of exercise 4; 12 of 12 checks pass" in said
    assert parts.own == ("KVCache", "Scheduler")
    assert all(getattr(parts, name) is getattr(PACKAGE, name) for name in NAMES if name not in parts.own)


def test_a_method_that_is_not_written_counts_as_not_done(folder, capsys):
    plant(folder, "05_block_pool", "return -(-num_tokens // self.block_size)",
          'raise NotImplementedError("Exercise 5: BlockPool.blocks_for")')
    assert take_parts(folder).BlockPool is PACKAGE.BlockPool
    assert "block pool: the package's, since exercise 5 is not done" in capsys.readouterr().out


def test_only_what_an_answer_needs_runs(folder, capsys):
    """Cells of the learner's own, checks, demonstrations and IPython's lines do nothing; helpers come along."""
    path = folder / "04_continuous_scheduler.ipynb"
    content = json.loads(path.read_text(encoding="utf-8"))

    def cell(source, *tags):
        return {"cell_type": "code", "source": source, "metadata": {"tags": list(tags)}, "outputs": []}

    content["cells"] += [
        cell("%matplotlib inline\nraise SystemExit"), cell("1 / 0"), cell("broken = 1 / 0"), cell("def half(:"),
        cell("class Scheduler: pass", "demo"), cell("LIMIT = 3\n\ndef most(scheduler):\n    return LIMIT"),
        cell("first = Scheduler\n\nclass Scheduler(first):\n    most = most"),
    ]
    path.write_text(json.dumps(content), encoding="utf-8")
    scheduler = take_parts(folder).Scheduler
    assert scheduler.most(None) == 3 and scheduler.__name__ == "Scheduler" and hasattr(scheduler, "plan")


def test_an_answer_that_fails_when_it_is_defined_is_said_to(folder, capsys):
    plant(folder, "04_continuous_scheduler", "class Scheduler:", "class Scheduler(Missing):")
    assert take_parts(folder).Scheduler is PACKAGE.Scheduler
    assert "its cell in 04_continuous_scheduler.ipynb fails: NameError" in capsys.readouterr().out


def test_the_grader_marks_it_with_the_packages_parts(folder):
    """It has one notebook at a time, and a wrong answer to another exercise costs no marks here."""
    text = (FOLDER / "solutions" / "13_your_engine.ipynb").read_text(encoding="utf-8")
    (folder / "13_your_engine.ipynb").write_text(text, encoding="utf-8")
    plant(folder, *WRONG["every draft is accepted"][:3])
    marks = grade_notebook(folder / "13_your_engine.ipynb", Limits())
    assert marks.points == marks.out_of, [o for row in marks.outcomes.values() for o in row if not o.passed]
