"""Checks for the exercises, and the grader that runs them on a class. Start with `checks.py`."""

from minillm.course.grading.checks import check, hint

__all__ = ["check", "hint"]
