"""The IPython in which a submission's cells run, so that they run as in Jupyter.

The package itself does not need IPython, so this file is imported only when cells run.
"""

from __future__ import annotations

import asyncio
import atexit
import re
import subprocess
import sys
from functools import cache

from IPython.core import page
from IPython.core.compilerop import CachingCompiler
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.text import SList
from traitlets import Type
from traitlets.config import Config

INSTALLS = re.compile(r"\b(pip3?|conda|mamba|micromamba|uv|apt|apt-get|brew)\b.*\b(install|uninstall|remove|update|"
                      r"upgrade|add|sync)\b")
SCRIPTS = ("!", "sx", "system", "bash", "sh", "script", "cmd")  # cell magics whose body a system's shell runs
CONFIG = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}})


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop that runs all cells of this process: in Jupyter one is running too, whenever a cell does."""
    return asyncio.new_event_loop()


def leave(*_) -> None:
    """`exit` and `quit`."""
    raise SystemExit


class CellNames(CachingCompiler):
    """Calls a cell's code by its place in the notebook, for tracebacks."""

    name = "<cell>"

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return self.name


class NotebookShell(InteractiveShell):
    """IPython without a person before it: no history, no pictures, no pager, no tracebacks printed, no installing."""

    compiler_class = Type(CellNames)

    @classmethod
    def fresh(cls) -> NotebookShell:
        """A shell with an empty `__main__`, in place of the one before."""
        cls.clear_instance()
        shell = cls.instance(config=CONFIG)
        atexit.unregister(shell.atexit_operations)  # would keep every shell, and what its cells made, until the end
        shell.set_hook("show_in_pager", page.as_hook(page.display_page), 90)
        shell.left_out = []  # what a cell asked for and was not given, a line each
        return shell

    def run(self, source: str, name: str) -> BaseException | None:
        """Run one cell; its error, if it raised one. `name` stands in tracebacks."""
        self.compile.name, problem, loop = name, None, event_loop()
        try:
            transformed = self.transform_cell(source)
        except Exception:
            transformed, problem = source, sys.exc_info()
        try:
            result = loop.run_until_complete(self.run_cell_async(
                source, store_history=True, transformed_cell=transformed, preprocessing_exc_tuple=problem))
        except BaseException:  # of the loop itself, such as a time limit between two of its tasks
            for task in asyncio.all_tasks(loop):
                task.cancel()
            raise
        return result.error_before_exec or result.error_in_exec

    def init_user_ns(self) -> None:
        super().init_user_ns()
        self.user_ns.update(exit=leave, quit=leave)

    def showtraceback(self, *_, **__) -> None:
        """Nothing: the output is not read."""

    showsyntaxerror = showindentationerror = showtraceback

    def _format_exception_for_storage(self, *_, **__) -> dict:
        return {}

    def enable_gui(self, gui: str | None = None) -> None:
        """Nothing: there is no window."""

    # -- magics and commands ----------------------------------------------------------------------

    def refused(self, command: str) -> bool:
        """Whether it is not run, since it would change the Python that grades."""
        if found := INSTALLS.search(command):
            self.left_out.append(f"`{found[0]}` was not run: a hand-in installs nothing")
        return bool(found)

    def system(self, cmd: str) -> None:
        """`!cmd`."""
        cmd = self.var_expand(cmd, depth=1)
        if not self.refused(cmd):
            done = subprocess.run(cmd, shell=True, stdin=subprocess.DEVNULL, capture_output=True)
            self.user_ns["_exit_code"] = done.returncode

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0):
        """`x = !cmd`."""
        if self.refused(cmd):
            return SList() if split else ""
        return super().getoutput(cmd, split, depth + 1)

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1):
        """A magic that this place lacks is left out, so that it costs no marks; nor are there pictures to set up."""
        if magic_name == "matplotlib" or line.startswith("InlineBackend") or self.refused(f"{magic_name} {line}"):
            return None
        try:
            return super().run_line_magic(magic_name, line, _stack_depth + 1)
        except (UsageError, ImportError) as error:
            self.left_out.append(f"`%{magic_name} {line}` was left out: {error}")

    def run_cell_magic(self, magic_name: str, line: str, cell: str):
        """One that this place lacks is left out, and its cell runs as if it stood there alone."""
        if magic_name in SCRIPTS and self.refused(cell):
            return None
        try:
            return super().run_cell_magic(magic_name, line, cell)
        except UsageError as error:
            self.left_out.append(f"`%%{magic_name}` was left out: {error}")
            self.ex(self.transform_cell(cell))
