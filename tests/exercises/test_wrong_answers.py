"""The checks on the whole matrix: solutions, stubs, mutants by hand and by rule, and other right answers."""

from __future__ import annotations

import importlib
from functools import cache

import pytest
import torch
from wrong_answers import SECONDS, Mutant, Solution, by_rule, outcomes

from minillm.course.grading.exercises import load_all
from minillm.course.grading.tasks import Exercise, Task

EXERCISES = load_all()
TASKS = [(exercise, task) for exercise in EXERCISES for task in exercise.tasks]
CAUGHT_SHARE = 0.95  # of the mutants made by rule
FAR_OUTSIDE = 10.0  # tolerances by which a wrong answer must miss where a check has a tolerance


def data(exercise: Exercise):
    """The exercise's file of wrong and right answers, tests/exercises/exNN_name.py."""
    return importlib.import_module(f"ex{exercise.name}")


def seconds(exercise: Exercise) -> float:
    """Processor time for a mutant's check; an exercise whose checks serve whole loads says how much it needs."""
    return getattr(data(exercise), "SECONDS", SECONDS)


@cache
def solution(exercise: Exercise) -> Solution:
    return Solution(exercise)


def mutants() -> list:
    return [pytest.param(exercise, mutant, id=f"{exercise.number}: {mutant.mistake}")
            for exercise in EXERCISES for mutant in data(exercise).MUTANTS]


def by_task(exercise: Exercise, task: Task) -> str:
    return f"{exercise.number}-{task.name}"


tasks = pytest.mark.parametrize(("exercise", "task"), [pytest.param(e, t, id=by_task(e, t)) for e, t in TASKS])


@tasks
def test_the_solution_passes_every_check(exercise, task):
    failed = [o for o in outcomes(task, solution(exercise).answer(task), seconds=10) if not o.passed]
    assert not failed, failed[0]


@tasks
def test_right_answers_written_another_way_pass(exercise, task, record_property):
    alternatives = data(exercise).ALTERNATIVES[task.name]
    assert len(alternatives) >= 2
    for answer in alternatives:
        margin = worst_margin(task, answer)
        if margin is not None:
            record_property(f"margin of {answer.__qualname__}", margin)  # for --junit-xml
            threads = torch.get_num_threads()
            torch.set_num_threads(3 - threads if threads in (1, 2) else 1)  # sums may come in another order
            try:
                worst_margin(task, answer)
            finally:
                torch.set_num_threads(threads)


def worst_margin(task: Task, answer) -> float | None:
    """The largest error of a right answer in tolerances, after making sure that it passes; None without tolerances."""
    found = outcomes(task, answer, seconds=10)
    failed = [o for o in found if not o.passed]
    assert not failed, f"{answer.__qualname__}: {failed[0]}"
    return max((o.margin for o in found if o.margin is not None), default=None)


@pytest.mark.parametrize(("exercise", "mutant"), mutants())
def test_a_mutant_is_caught_by_the_check_that_names_its_mistake(exercise, mutant: Mutant, record_property):
    task = next(task for task in exercise.tasks if task.name == mutant.task)
    source = solution(exercise).source(task)
    assert source.count(mutant.old) == 1, f"{mutant.old!r} stands {source.count(mutant.old)} times in the solution"
    answer = solution(exercise).answer(task, source.replace(mutant.old, mutant.new).replace(*mutant.also))
    found = outcomes(task, answer, seconds(exercise))
    first = next((o for o in found if o.passed is False), None)
    assert first is not None, "no check caught it"
    assert first.check == mutant.caught_by, f"the learner is told first: {first.message} {first.detail}"
    assert mutant.says in first.message, f"the learner is told: {first.message}"
    record_property("margin", first.margin)
    assert first.margin is None or first.margin >= FAR_OUTSIDE, f"it misses by {first.margin:.2g} tolerances only"


@tasks
def test_an_exercise_has_enough_mutants_and_hints(exercise, task):
    assert len(data(exercise).MUTANTS) >= 4
    assert len(task.checks) >= 2 and len(set(task.hints)) == 3
    assert len({check.name for check in task.checks}) == len(task.checks)


@tasks
def test_nothing_and_none_score_nothing(exercise, task):
    """GRD-1: an answer that returns None, in a function or in every method, passes no check."""
    answer = solution(exercise).answer(task)
    if isinstance(answer, type):
        methods = {name: (lambda *a, **k: None) for name, value in vars(answer).items() if callable(value)}
        empty = type(answer.__name__, (), methods)
    else:
        def empty(*args, **kwargs):
            return None

    assert sum(o.passed is True for o in outcomes(task, empty)) == 0


@tasks
def test_mutants_made_by_rule_are_caught(exercise, task):
    """At least 95 %, and every survivor stands in the exercise's file with the reason why it is no wrong answer."""
    whole = solution(exercise)
    mutants = dict(by_rule(whole.source(task)))
    survivors = [name for name, source in mutants.items() if survives(whole, task, source)]
    explained = data(exercise).SURVIVORS.get(task.name, {})
    assert set(survivors) == set(explained), "survivors and their list differ"
    assert all(explained.values())
    assert 1 - len(survivors) / len(mutants) >= CAUGHT_SHARE, f"{len(survivors)} of {len(mutants)} survive"


def survives(whole: Solution, task: Task, source: str) -> bool:
    answer = whole.answer(task, source)
    return answer is not None and all(o.passed for o in outcomes(task, answer, seconds(whole.exercise)))
