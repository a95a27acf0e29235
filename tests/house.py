"""The house as it stands: lines per room, the heart in reading order with its imports, the longest functions.

    python tests/house.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minillm"
# Imports point left only.
FLOORS = ("model", "ladder", "guard", "extras", "fast", "load", "measure", "serve", "course", "cli")
HEART = ("model", "ladder")
ON_ENTRY = "minillm.guard.inputs"  # the one room that the heart calls


def modules(room: str = "") -> list[Path]:
    """The Python files of a room, or of all."""
    return sorted((PACKAGE / room).rglob("*.py"))


def module_name(path: Path) -> str:
    """minillm/ladder/decode.py -> minillm.ladder.decode."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def room_of(name: str) -> str | None:
    """The floor of a module, None for the package itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else None


def imports(path: Path) -> list[str]:
    """The package's own modules that a file imports, at the top or inside a function, in their order."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if is_module(name) else node.module for name in names]
        else:
            continue
        found |= dict.fromkeys(name for name in names if name.split(".")[0] == "minillm")
    return list(found)


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def reading_order() -> list[Path]:
    """The heart's files as the README lists them: lines of the form `  ladder/decode.py   text`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [PACKAGE / name for name in re.findall(r"^ +((?:model|ladder)/\w+\.py) ", text, flags=re.M)]


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, name) of each function of a file, its docstring and decorators counted."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [
        (node.end_lineno - min([node.lineno, *(d.lineno for d in node.decorator_list)]) + 1, node.name)
        for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def main() -> None:
    total = {room: sum(map(lines, modules(room))) for room in FLOORS}
    print("lines per room")
    for room in reversed(FLOORS):
        print(f"  {room:<8} {total[room]:>6,}")
    print(f"  the heart (model and ladder): {sum(total[room] for room in HEART):,}")
    print(f"  the package without course/: {sum(map(lines, modules())) - total['course']:,}")
    print("the heart in reading order, and what each file imports of the package")
    for path in reading_order():
        names = ", ".join(name.removeprefix("minillm.") for name in imports(path)) or "nothing"
        print(f"  {path.relative_to(PACKAGE)!s:<24} {lines(path):>4} lines   {names}")
    heart = reading_order()
    every = [(size, f"{path.relative_to(PACKAGE)}:{name}") for path in heart for size, name in functions(path)]
    print(f"functions of the heart: {len(every)}, median {median(size for size, _ in every):.0f} lines; the longest:")
    for size, name in sorted(every, reverse=True)[:5]:
        print(f"  {size:>3} {name}")


if __name__ == "__main__":
    main()
