"""Wrong and right answers to exercise 12."""

from wrong_answers import Mutant

SECONDS = 5.0  # of processor time a check: a right answer serves four loads in virtual time, in about half a second

SOLUTION = "sorted(prompts, key=lambda prompt: (now - prompt.arrival + 0.1) / prompt.left, reverse=True)"
KEY = "(now - prompt.arrival + 0.1) / prompt.left, reverse=True"
MUTANTS = [
    Mutant("order_prompts", "drops what is too long",
           "sorted(prompts,", "sorted([p for p in prompts if p.left < 9000],",
           caught_by="every prompt comes back, once"),
    Mutant("order_prompts", "returns the first only", SOLUTION, f"{SOLUTION}[:1]",
           caught_by="every prompt comes back, once"),
    Mutant("order_prompts", "first come, first served", KEY, "prompt.number",
           caught_by="of two that came together, the shorter one goes first"),
    Mutant("order_prompts", "longest first", KEY, "prompt.left, reverse=True",
           caught_by="of two that came together, the shorter one goes first"),
    Mutant("order_prompts", "who waited longest, whatever it needs", KEY, "now - prompt.arrival, reverse=True",
           caught_by="of two that came together, the shorter one goes first"),
    Mutant("order_prompts", "all that have just come are alike", " + 0.1", "",
           caught_by="of two that came together, the shorter one goes first"),
    Mutant("order_prompts", "the whole prompt in place of what is left", "prompt.left", "prompt.tokens",
           caught_by="what is left counts, not what was asked"),
    Mutant("order_prompts", "sorts in place", SOLUTION,
           f"[prompts.sort(key=lambda prompt: {KEY}), prompts][1]",
           caught_by="the list that was passed in stays as it was"),
    Mutant("order_prompts", "shortest first, for ever", KEY, "prompt.left", caught_by="nobody waits for ever"),
    Mutant("order_prompts", "waiting counts against one", KEY, "prompt.left + 3000 * (now - prompt.arrival)",
           caught_by="nobody waits for ever"),
    Mutant("order_prompts", "arrival in place of waiting", KEY, "prompt.left - 3000 * prompt.arrival",
           caught_by="nobody waits for ever"),
    Mutant("order_prompts", "waiting counts for nearly everything", KEY, "prompt.left - 1e5 * (now - prompt.arrival)",
           caught_by="the p99 is a quarter lower, and the throughput the same"),
    Mutant("order_prompts", "waiting counts next to nothing", KEY, "prompt.left - 50 * (now - prompt.arrival)",
           caught_by="nobody waits for ever"),
]

SURVIVORS = {}


def by_handicap(prompts, now):
    """Tokens left, of which every second of waiting takes off 3,000."""
    return sorted(prompts, key=lambda prompt: prompt.left - 3000 * (now - prompt.arrival))


def two_queues(prompts, now):
    """Whoever has waited for two seconds in order of arrival, then the others, shortest first."""
    overdue = [prompt for prompt in prompts if now - prompt.arrival > 2]
    others = [prompt for prompt in prompts if now - prompt.arrival <= 2]
    overdue.sort(key=lambda prompt: prompt.arrival)
    others.sort(key=lambda prompt: prompt.left)
    return overdue + others


ALTERNATIVES = {"order_prompts": [by_handicap, two_queues]}
