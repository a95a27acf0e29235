"""Wrong and right answers to exercise 3."""

from wrong_answers import Mutant

STAYS = "a finished row stays, and is idle"

MUTANTS = [
    Mutant("run_static", "ends with the shortest", "in range(max(", "in range(min(",
           caught_by="a batch runs until its longest has ended"),
    Mutant("run_static", "ends with the first", "max(lengths[request] for request in members)", "lengths[first]",
           caught_by="a batch runs until its longest has ended"),
    Mutant("run_static", "finished rows leave", "for request in members])",
           "for request in members if made < lengths[request]])", caught_by=STAYS),
    Mutant("run_static", "idle a step late", "made >= lengths", "made > lengths", caught_by=STAYS),
    Mutant("run_static", "idle a step early", "made >= lengths[request]", "made >= lengths[request] - 1",
           caught_by="a request alone has one row for each of its tokens"),
    Mutant("run_static", "idle the wrong way round", "made >= lengths", "made < lengths",
           caught_by="a request alone has one row for each of its tokens"),
    Mutant("run_static", "a waiting request joins", "    return steps",
           "    return [[(r, i) for r, i in step if not i] + [(len(lengths) - 1, False)] * any(i for _, i in step)\n"
           "            for step in steps] if len(lengths) > batch else steps",
           caught_by="nobody joins a batch that runs"),
    Mutant("run_static", "the last batch is lost", "range(0, len(lengths), batch)",
           "range(0, len(lengths) - batch + 1, batch) if len(lengths) > batch else range(0, len(lengths), batch)",
           caught_by="the last batch may be smaller, and nobody is left out"),
    Mutant("run_static", "sorts by length first", "    steps = []", "    lengths.sort()\n    steps = []",
           caught_by=STAYS),
    Mutant("idle_slot_steps", "counts the rows that work", "sum(idle for", "sum(not idle for",
           caught_by="counts idle rows"),
    Mutant("idle_slot_steps", "counts steps", "sum(idle for step in steps for _, idle in step)",
           "sum(any(idle for _, idle in step) for step in steps)", caught_by="counts every idle row of a step"),
    Mutant("returned_after", "comes back with its own last token", "result += [passed] * len(group)",
           "result += [passed - max(group) + own for own in group]",
           caught_by="a short answer waits for the longest of its batch"),
    Mutant("returned_after", "forgets the batches before", "passed += max(group)", "passed = max(group)",
           caught_by="a batch waits for the batches before it"),
    Mutant("returned_after", "takes the caller's list apart",
           "for first in range(0, len(lengths), batch):\n        group = lengths[first : first + batch]",
           "while lengths:\n        group = lengths[:batch]\n        del lengths[:batch]",
           caught_by="the list of lengths stays as it was"),
    Mutant("returned_after", "expects a request", "result, passed = [], 0", "result, passed = [], 0 * lengths[0]",
           caught_by="every request has an answer"),
    Mutant("returned_after", "fills the last batch up", "* len(group)", "* min(batch, len(lengths))",
           caught_by="every request has an answer"),
    Mutant("returned_after", "adds all lengths", "max(group)", "sum(group)",
           caught_by="a short answer waits for the longest of its batch"),
]

SURVIVORS = {}


def step_by_step(lengths, batch):
    waiting, running, made, steps = list(range(len(lengths))), [], {}, []
    while waiting or running:
        if not running:
            running, waiting = waiting[:batch], waiting[batch:]
        steps.append([(request, made.get(request, 0) == lengths[request]) for request in running])
        for request in running:
            made[request] = min(made.get(request, 0) + 1, lengths[request])
        if all(made[request] == lengths[request] for request in running):
            running = []
    return steps


def with_countdown(lengths, batch):
    steps, rest = [], list(enumerate(lengths))
    while rest:
        now, rest = rest[:batch], rest[batch:]
        left = dict(now)
        while max(left.values()) > 0:
            steps.append([[request, left[request] <= 0] for request, _ in now])
            left = {request: tokens - 1 for request, tokens in left.items()}
    return steps


def idle_by_loop(steps):
    number = 0
    for step in steps:
        for row in step:
            if row[1]:
                number += 1
    return number


def idle_by_difference(steps):
    return sum(map(len, steps)) - len([row for step in steps for row in step if not row[1]])


def returned_by_steps(lengths, batch):
    last = {}
    for number, step in enumerate(step_by_step(lengths, batch), 1):
        last.update({request: number for request, _ in step})
    return [last[request] for request in range(len(lengths))]


def returned_by_sums(lengths, batch):
    ends = [max(lengths[i : i + batch]) for i in range(0, len(lengths), batch)]
    return tuple(sum(ends[: i // batch + 1]) for i in range(len(lengths)))


ALTERNATIVES = {
    "run_static": [step_by_step, with_countdown],
    "idle_slot_steps": [idle_by_loop, idle_by_difference],
    "returned_after": [returned_by_steps, returned_by_sums],
}
