"""Are the notebooks what their sources say, run, and able to fail? (`make test` then runs them with nbval.)"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from test_package import LOCAL_PATH

from minillm.course.show.tables import text_table

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
CHECK = "# NBVAL_CHECK_OUTPUT"
MAX_BYTES = 3_000_000

spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


def outputs_text(cell: NotebookNode) -> str:
    """What a cell has stored, but for pictures."""
    kept = []
    for output in cell.outputs:
        kept += [output.get("text", ""), *output.get("traceback", [])]
        kept += [str(value) for mime, value in output.get("data", {}).items() if not mime.startswith("image/")]
    return "\n".join(kept)


def cell_faults(cell: NotebookNode) -> list[str]:
    faults = []
    if "NBVAL" in cell.source and cell.source.splitlines()[0] != CHECK:
        faults.append(f"nbval's marker is not the first line, spelled {CHECK}: it might not be seen")
    if cell.source.startswith(CHECK):
        # nbval passes such a cell without looking.
        if cell.execution_count is None or not cell.outputs:
            faults.append("a check cell has nothing stored to compare with")
        # Warnings change with every release of what we import.
        if any(output.get("name") == "stderr" for output in cell.outputs):
            faults.append("a check cell has written to stderr")
    tagged = "raises-exception" in cell.metadata.get("tags", [])
    if any(output.output_type == "error" for output in cell.outputs) and not tagged:
        faults.append("an error is stored, and the cell has no tag raises-exception")
    if path := LOCAL_PATH.search(outputs_text(cell)):
        faults.append(f"an output names a path of one machine: {path[0]}")
    if address := re.search(r"<.* at 0x[0-9a-f]+>", outputs_text(cell)):
        faults.append(f"an output shows an address, other in every run: {address[0]}")
    return faults


def faults(notebook: NotebookNode) -> list[str]:
    """What is wrong with a notebook as it is stored; an empty list for a good one."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    found = [f"cell {cell.id}: {fault}" for cell in code for fault in cell_faults(cell)]
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("the kernel is not python3, so it starts on its author's machine only")
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("it was not run from top to bottom in a fresh kernel")
    return found


MOST_COLUMNS = 6  # of a printed table: more are a plot, or columns too many


def page_faults(notebook: NotebookNode) -> list[str]:
    """What a reader meets too much of on one page."""
    texts = [outputs_text(cell) for cell in notebook.cells if cell.cell_type == "code"]
    rules = [line for text in texts for line in text.splitlines() if re.fullmatch(r"-+(  -+)+", line)]
    found = [f"a table has {columns} columns" for line in rules if (columns := len(line.split())) > MOST_COLUMNS]
    if (said := sum(text.count("No GPU run is recorded") for text in texts)) > 1:
        found.append(f"it says {said} times that no GPU run is recorded")
    return found


# --- the notebooks that we ship ---------------------------------------------------------------------------------


def test_each_source_has_its_notebook():
    assert sorted(path.stem for path in (FOLDER / "src").glob("*.py")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_what_its_source_says(name):
    source = build.convert(FOLDER / "src" / f"{name}.py")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    cells = [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]
    expected = [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in source.cells]
    assert cells == expected, f"run: make notebooks, or python notebooks/build.py {name}"


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_stored_well(name):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < MAX_BYTES
    notebook = nbformat.read(path, as_version=4)
    assert not (found := faults(notebook) + page_faults(notebook)), "\n".join(found)


PARTS = ("**You will learn**", "guess", "show_source(")  # somewhere on each page
ENDING = (
    "## Where it loses", "## Claims of the ledger that this page settles", "ledger(",
    "## What a production engine calls this",
)
SETTLES_NONE = "This page settles no claim of the ledger"  # in place of them, on a page beyond the two articles


def ending_of(name: str) -> tuple[str, ...]:
    """The parts that end a page, in their order."""
    return (ENDING[0], SETTLES_NONE, ENDING[-1]) if "beyond" in name else ENDING


@pytest.mark.parametrize("name", [name for name in NAMES if "appendix" not in name and "lab" not in name])
def test_each_chapter_has_its_parts_in_their_order(name):
    text = (FOLDER / "src" / f"{name}.py").read_text(encoding="utf-8")
    assert not [part for part in PARTS if part not in text]
    assert (SETTLES_NONE in text) != ("ledger(" in text)
    parts = (*ending_of(name), "## Exercise", "[How these pages are made](README.md)")
    places = [text.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), dict(zip(parts, places, strict=True))


GUESS = re.compile(r'^guess\("([^"]+)", None\)$', re.M)
REVEAL = re.compile(r'reveal\((f?)"([^"]+)"')


def unrevealed(text: str) -> list[str]:
    """The guesses of a page that nothing measured is ever set beside, as far as the names can be read."""
    if re.search(r'reveal\((?!f?")', text):
        return []
    # A name that is put together, "{phase}, times", reveals all that fit.
    patterns = [re.sub(r"\\{.*?\\}", ".+", re.escape(about)) if f else re.escape(about)
                for f, about in REVEAL.findall(text)]
    return [about for about in GUESS.findall(text) if not any(re.fullmatch(each, about) for each in patterns)]


@pytest.mark.parametrize("name", NAMES)
def test_each_guess_is_asked_blank_revealed_and_listed_before_the_exercise(name):
    text = (FOLDER / "src" / f"{name}.py").read_text(encoding="utf-8")
    assert not re.search(r"^guess\((?!.*None\)$)", text, re.M), "a guess that the author has made"
    assert not (silent := unrevealed(text)), f"never revealed: {silent}"
    if GUESS.search(text):
        assert "\nguesses()" in text and text.index("\nguesses()") < text.index("## Exercise")


@pytest.mark.parametrize("name", NAMES)
def test_no_compared_cell_shows_a_learners_guess(name):
    cells = build.convert(FOLDER / "src" / f"{name}.py").cells
    assert not [c.source for c in cells if c.source.startswith(CHECK) and re.search(r"reveal\(|guesses\(", c.source)]


def test_a_guess_that_is_never_revealed_is_found():
    asked = 'guess("steps", None)\nguess("share, first", None)\nguess("share, 8 of 9", None)\n'
    assert unrevealed(asked + 'reveal(f"share, {part}", 1)') == ["steps"]
    assert unrevealed(asked + 'reveal("steps", 1)') == ["share, first", "share, 8 of 9"]
    fits_one = 'reveal("steps", 1)\nreveal("share, .*", 1)\nreveal(f"share, 8 of {n}", 9)'
    assert unrevealed(asked + fits_one) == ["share, first"]


# --- and these tests, and nbval, can fail -----------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "runs", "found"), [
    (6, 1, []), (7, 0, ["a table has 7 columns"]), (2, 2, ["it says 2 times that no GPU run is recorded"]),
])
def test_a_table_that_is_too_wide_and_a_line_said_twice_are_found(columns, runs, found):
    table = text_table([dict.fromkeys(map(str, range(columns)), 1)], {str(i): str(i) for i in range(columns)})
    texts = [table, *["No GPU run is recorded yet for B1."] * runs]
    cells = [nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", text=text)]) for text in texts]
    assert page_faults(nbformat.v4.new_notebook(cells=cells)) == found


SOURCE = """\
# %% [markdown]
# Text, with nothing to run.

# %%
import sys, time, warnings
import ipywidgets
import matplotlib.pyplot as plt
from tqdm.auto import tqdm

start = time.perf_counter()
for _ in tqdm(range(3)):
    time.sleep(0.001)
print(f"{time.perf_counter() - start:.6f} s")
warnings.warn("an old way of doing this")
sys.stderr.write("noise")

# %%
ipywidgets.interact(lambda n: n * n, n=(1, 5))
plt.plot([1, 2]);

# %%
# NBVAL_CHECK_OUTPUT
print({"blocks": 4, "free": 0})
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> NotebookNode:
    """A notebook made by build.py, with all that differs between two runs in the cells that are not compared."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "good.py").write_text(SOURCE, encoding="utf-8")
    notebook = build.convert(folder / "good.py")
    build.execute(notebook, folder)
    # A warning names the file of its cell, which is why no shipped notebook may store one.
    notebook.cells[1].outputs = [output for output in notebook.cells[1].outputs if output.get("name") != "stderr"]
    return notebook


def copy(notebook: NotebookNode) -> NotebookNode:
    return nbformat.from_dict(notebook)


def test_a_good_notebook_has_no_faults(good):
    assert faults(good) == []
    assert "execution" not in good.cells[1].metadata and good.metadata == build.METADATA
    assert [sorted(output.data) for output in good.cells[2].outputs] == [["image/png", "text/plain"]]  # no widget


def unrun(notebook):
    notebook.cells[-1].update(execution_count=None, outputs=[])


def emptied(notebook):
    notebook.cells[-1].outputs = []


def late_marker(notebook):
    notebook.cells[-1].source = "x = 1\n" + notebook.cells[-1].source


def misspelled(notebook):
    notebook.cells[-1].source = "# NBVAL_CHECK_OUTPUTS\nprint(1)"


def own_kernel(notebook):
    notebook.metadata.kernelspec.name = "my-env"


def run_twice(notebook):
    notebook.cells[-1].execution_count = 9


def failed(notebook):
    notebook.cells[1].outputs.append(nbformat.v4.new_output("error", ename="E", evalue="", traceback=[]))


def shows(text, name="stdout"):
    def plant(notebook):
        notebook.cells[-1].outputs.append(nbformat.v4.new_output("stream", name=name, text=text))

    return plant


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (unrun, "nothing stored to compare"),
        (emptied, "nothing stored to compare"),
        (late_marker, "not the first line"),
        (misspelled, "not the first line"),
        (own_kernel, "not python3"),
        (run_twice, "top to bottom"),
        (failed, "an error is stored"),
        (shows("/ho" + "me/ann/model"), "path of one machine"),
        (shows("<object at 0x7f00>"), "address"),
        (shows("old", name="stderr"), "stderr"),
    ],
)
def test_a_planted_fault_is_found(good, plant, message):
    notebook = copy(good)
    plant(notebook)
    assert any(message in fault for fault in faults(notebook)), faults(notebook)


def test_nbval_fails_on_a_wrong_number_and_on_nothing_else(good, tmp_path):
    """The same notebook three times: as made, with one digit changed, and with its check cell never run."""
    wrong, blank = copy(good), copy(good)
    wrong.cells[-1].outputs[0].text = wrong.cells[-1].outputs[0].text.replace("4", "5")
    unrun(blank)
    for name, notebook in [("right", good), ("wrong", wrong), ("blank", blank)]:
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=60", "-rf"]
    # One thread now, as many as there were when the outputs were stored: only noise may change.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    assert re.findall(r"^FAILED (\w+)\.ipynb", run.stdout, flags=re.M) == ["wrong"], run.stdout
    assert "1 failed, 8 passed" in run.stdout  # the blank one passed: this is why `faults` must look for it


# A fault that no error betrays: values have no part in the cache's bytes.
RIGHT = 'return kv_storage(config, kv_format, 1, "meta").nbytes'
FAULT = f"{RIGHT} // 2"


def test_nbval_fails_on_a_fault_planted_in_the_package(tmp_path):
    """Two check cells of chapter 8 as they are stored, run with the package as it is, and with the fault in it."""
    package = tmp_path / "faulty" / "minillm"
    shutil.copytree(FOLDER.parent / "minillm", package, ignore=shutil.ignore_patterns("__pycache__", "weights"))
    module = package / "ladder" / "quantized.py"
    assert module.read_text(encoding="utf-8").count(RIGHT) == 1
    module.write_text(module.read_text(encoding="utf-8").replace(RIGHT, FAULT), encoding="utf-8")
    stored = nbformat.read(FOLDER / "08_capacity.ipynb", as_version=4).cells
    wanted = ("from minillm.ladder.quantized import", "the rule of thumb says", "allocated is 1,000")
    cells = [cell for cell in stored if cell.cell_type == "code" and any(text in cell.source for text in wanted)]
    assert len(cells) == 3 and all(cell.source.startswith(CHECK) and cell.outputs for cell in cells[1:])
    for name, folder in (("right", FOLDER.parent), ("wrong", package.parent)):
        first = nbformat.v4.new_code_cell(f"import sys\nsys.path.insert(0, {str(folder)!r})")
        notebook = nbformat.v4.new_notebook(cells=[first, *map(copy, cells)], metadata=build.METADATA)
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=120", "-rf"]
    files = [str(tmp_path / f"{name}.ipynb") for name in ("right", "wrong")]
    run = subprocess.run([*command, *files], cwd=tmp_path, capture_output=True, text=True)
    assert re.findall(r"^FAILED (\w+)\.ipynb", run.stdout, flags=re.M) == ["wrong", "wrong"], run.stdout + run.stderr
    assert "2 failed, 6 passed" in run.stdout


# In each page's own code, one thing wrong that raises no error.
OWN_FAULTS = {
    "01_decode_loop": ("cache.length += len(feed)", "cache.length += 1"),  # a cache that forgets most of the prompt
    "02_static_batching": ("[len(request.prompt) - 1 for", "[longest - 1 for"),  # what follows the padding
    "03_continuous_batching": ("self.keys[layer, slot, start:end]", "self.keys[layer, 0, start:end]"),  # all in slot 0
}


@pytest.mark.parametrize("name", OWN_FAULTS)
def test_nbval_fails_on_a_fault_planted_in_what_the_page_builds(name, tmp_path, smollm2_dir):
    """The page up to its comparison with the package, as it is stored, and with the fault in it."""
    right, wrong = OWN_FAULTS[name]
    cells = [copy(cell) for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells]
    start = next(at for at, cell in enumerate(cells) if cell.source.startswith("## The same tokens"))
    cells = [cell for cell in cells[: start + 2] if cell.cell_type == "code"]
    assert cells[-1].source.startswith(CHECK) and sum(cell.source.count(right) for cell in cells) == 1
    for file in ("right", "wrong"):
        notebook = nbformat.v4.new_notebook(cells=cells, metadata=build.METADATA)
        nbformat.write(notebook, tmp_path / f"{file}.ipynb")
        for cell in cells:
            cell.source = cell.source.replace(right, wrong)
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=120", "-rf"]
    run = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, env=os.environ
                         | {"MINILLM_QUICK": "1", "PYTHONPATH": str(FOLDER.parent)})
    assert set(re.findall(r"^FAILED (\w+)\.ipynb", run.stdout, flags=re.M)) == {"wrong"}, run.stdout + run.stderr
