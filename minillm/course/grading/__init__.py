"""Checks for the exercises, and the grader that runs them on a class. Start with `tasks.py`, then `checks.py`.

otter-grader would replace runner, notebook reader, report and classroom only in part. It isolates a submission in a
Docker container or, without Docker, not at all, and gives a table of grades; here an endless loop or a crash costs one
task in a process of its own, and the report says which check most learners fail first. Its test files would still
have to call these checks, since the hints, the messages and the wrong answers that prove them are written for them.
"""

from minillm.course.grading.checks import check, hint

__all__ = ["check", "hint"]
