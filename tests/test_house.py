"""The house keeps its shape: floors, reading order, and the size of the heart."""

from __future__ import annotations

import house
import pytest


def test_no_import_goes_up_and_none_goes_in_a_circle():
    """Within a floor too: a file that needs another must not be needed by it."""
    graph = {house.module_name(path): house.imports(path) for path in house.modules()}
    up = [
        f"{name} imports {other}" for name, others in graph.items() for other in others
        if (here := house.room_of(name)) and (there := house.room_of(other)) and other != house.ON_ENTRY
        and house.FLOORS.index(there) > house.FLOORS.index(here)
    ]
    assert not up, "\n".join(up)
    done, path = set(), []

    def visit(name: str) -> None:
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name):], name])}"
        if name in done or name not in graph:
            return
        path.append(name)
        for other in graph[name]:
            visit(other)
        done.add(path.pop())

    for name in graph:
        visit(name)


def test_the_reading_order_names_every_file_of_the_heart_once():
    listed = house.reading_order()
    files = [path for room in house.HEART for path in house.modules(room) if path.name != "__init__.py"]
    assert sorted(listed) == sorted(files) and len(set(listed)) == len(listed)


@pytest.mark.parametrize("place", range(len(house.reading_order())), ids=lambda i: house.reading_order()[i].stem)
def test_a_file_of_the_heart_imports_only_what_was_read_before_it(place):
    order = house.reading_order()
    known = {house.module_name(path) for path in order[:place]} | {house.ON_ENTRY}
    assert set(house.imports(order[place])) <= known


def test_the_heart_is_small_and_none_of_its_files_or_functions_is_long():
    order = house.reading_order()
    assert sum(house.lines(path) for room in house.HEART for path in house.modules(room)) <= 2300
    assert max(map(house.lines, order)) <= 300
    assert max(size for path in order for size, _ in house.functions(path)) <= 40


def test_every_room_says_in_three_lines_what_it_is_and_who_needs_it():
    for room in house.FLOORS:
        text = (house.PACKAGE / room / "__init__.py").read_text(encoding="utf-8")
        doc = text.split('"""')[1].strip()
        assert 1 <= len(doc.splitlines()) <= 3 or room == "cli", f"{room}/__init__.py: {doc}"
