"""What a reader gets: a light import, a wheel that holds everything, files of no one machine."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minillm"
# An absolute path of the author's machine. (Base64 has slashes too, but always a letter, digit, + or / before them.)
LOCAL_PATH = re.compile(r"(?<![A-Za-z0-9+/._~])(?:/(?:work|root|tmp|opt|var|home|Users)/|[A-Z]:\\+Users\\)[\w.$~-]+")
PACKAGE_INDEX = re.compile(r"pypi\.org|pythonhosted\.org|\bfile:///")  # pip knows where to look


def tracked_files() -> list[Path]:
    """Every file under version control; outside a clone, this test has nothing to say."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("not a git clone")
    return [path for name in git.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_import_is_light():
    heavy = ["transformers", "matplotlib", "ipywidgets", "IPython", "gguf", "huggingface_hub"]
    code = f"import sys, minillm; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]", f"`import minillm` takes seconds longer, because it imports {run.stdout}"


def test_the_ladder_and_every_experiment_s_rows_need_no_extra():
    extras = ["matplotlib", "IPython", "ipywidgets", "jupytext", "nbclient", "nbformat", "transformers", "pytest"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({extras})); import minillm.cli, minillm.course.catalogue, "
        "minillm.course.show.tables, minillm.course.show.live, minillm.course.grading.runner, minillm.measure.client"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr


def test_wheel_holds_every_module_and_the_type_marker(tmp_path):
    source = tmp_path / "source"  # building writes beside the sources
    shutil.copytree(PACKAGE, source / "minillm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ["pyproject.toml", "LICENSE", "README.md"]:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    run = subprocess.run(pip, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    wanted = {path.relative_to(ROOT).as_posix() for path in modules()} | {"minillm/py.typed"}
    assert wanted <= shipped, f"not in the wheel: {sorted(wanted - shipped)}"


def imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module]
    return []


def test_every_import_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = sum(project["optional-dependencies"].values(), project["dependencies"])
    names = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in declared}
    # torch's CUDA builds bring triton; ipywidgets brings IPython and traitlets; PIL is pillow.
    known = set(sys.stdlib_module_names) | names | {"minillm", "triton", "IPython", "traitlets"}
    known |= {"PIL"} if "pillow" in names else set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in imported_by(node):
                assert name.split(".")[0] in known, f"{path.relative_to(ROOT)} imports {name}: not in pyproject.toml"


def test_every_dependency_is_pinned_once():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==")[0].lower().replace("_", "-") for line in lines if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    assert all("==" in line or line.startswith("#") for line in lines)
    assert len(pins) == len(set(pins))
    assert {re.match(r"[\w-]+", line)[0] for line in wanted} <= set(pins)


def test_no_file_names_one_machine_or_a_package_index():
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or a data file
        for number, line in enumerate(text.splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {m[0]}" for m in LOCAL_PATH.finditer(line)]
            found += [f"{path.relative_to(ROOT)}:{number}: {m[0]}" for m in PACKAGE_INDEX.finditer(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("see " + "/ho" + "me/ann/x.py", True),
        ("'" + "/tm" + "p/ipykernel_12/3.py:1: Warning", True),
        ("C:" + "\\Users\\ann", True),
        ("iVBORw0KGgo" + "/tm" + "p/AAAA", False),  # inside a picture
        ("https://example.com" + "/ho" + "me/ann", False),
        ("~/.cache/minillm and .venv/bin/python", False),
    ],
)
def test_local_paths_are_recognised(text, caught):
    assert bool(LOCAL_PATH.search(text)) == caught


def test_readme_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    assert {"ladder", "lab", "test", "test-all", "lint", "clean", "help"} <= targets
    for readme in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "notebooks" / "README.md"]:
        if readme.exists():
            named = set(re.findall(r"(?:`|^ *\$? *)make ([a-z-]+)", readme.read_text(encoding="utf-8"), flags=re.M))
            assert named <= targets, f"{readme.relative_to(ROOT)} names no such target: {sorted(named - targets)}"
