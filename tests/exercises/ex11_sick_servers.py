"""Wrong and right answers to exercise 11."""

from statistics import mean

from wrong_answers import Mutant

SECONDS = 10.0  # of processor time a check: the servers' loads are served once, in virtual time

CAP = "a full batch with memory to spare is the batch cap's fault"
MEMORY = "live blocks near the size of the pool mean that memory is short"
PROMPTS = "steps full of prompt tokens mean that prompts are the work"
KNEE = "long steps with every limit far away are past the knee"
LIVE = "mean(lambda s: s.blocks_live / (s.blocks_live + s.blocks_cached + s.blocks_free))"
MUTANTS = [
    Mutant("diagnose", "rows without their cap", "mean(lambda s: s.rows) / settings.max_batch",
           "mean(lambda s: s.rows) / 100", caught_by=CAP),
    Mutant("diagnose", "the queue in place of the rows", "mean(lambda s: s.rows) / settings.max_batch",
           "mean(lambda s: s.waiting)", caught_by=CAP),
    Mutant("diagnose", "blocks without the pool's size", LIVE, "mean(lambda s: s.blocks_live)", caught_by=CAP),
    Mutant("diagnose", "cached blocks counted as taken", "s.blocks_live / (", "(s.blocks_live + s.blocks_cached) / (",
           caught_by=KNEE),
    Mutant("diagnose", "cached blocks left out of the pool", "(s.blocks_live + s.blocks_cached + s.blocks_free)",
           "(s.blocks_live + s.blocks_free)", caught_by=KNEE),
    Mutant("diagnose", "free blocks in place of taken ones", "s.blocks_live / (", "s.blocks_free / (", caught_by=CAP),
    Mutant("diagnose", "memory is short only with no block free", LIVE, "mean(lambda s: s.blocks_free < 1)",
           caught_by=MEMORY),
    Mutant("diagnose", "a budget from elsewhere", "settings.max_step_tokens", "2048", caught_by=PROMPTS),
    Mutant("diagnose", "prompt tokens for each output token",
           "mean(lambda s: s.prompt_tokens) / settings.max_step_tokens",
           "mean(lambda s: s.prompt_tokens) / mean(lambda s: s.decode_tokens)", caught_by=CAP),
    Mutant("diagnose", "prompt tokens against the rows' cap", "settings.max_step_tokens", "settings.max_batch",
           caught_by=CAP),
    Mutant("diagnose", "goes by the settings", "mean(lambda s: s.rows) / settings.max_batch",
           "1.0 * (settings.max_batch < 8)",
           caught_by="it looks at the records: servers with other settings have the same faults"),
    Mutant("diagnose", "sorts the records", "    steps = records.steps\n",
           "    steps = records.steps\n    steps.sort(key=lambda s: s.duration)\n",
           caught_by="the records stay as they were"),
    Mutant("diagnose", "does not know the knee", "1.0 - min(s.duration for s in steps) / mean(lambda s: s.duration)",
           "0.0", caught_by=KNEE),
    Mutant("diagnose", "the longest step in place of the shortest",
           "1.0 - min(s.duration for s in steps) / mean(lambda s: s.duration)",
           "max(s.duration for s in steps) / mean(lambda s: s.duration)", caught_by=CAP),
    Mutant("diagnose", "the limit that is least used", "max(used", "min(used", caught_by=CAP),
    Mutant("treat", "more memory's worth of rows", '"memory": "int8_kv"', '"memory": "more_rows"',
           caught_by="short memory is cured"),
    Mutant("treat", "8 bits for a full batch", '"batch_cap": "more_rows"', '"batch_cap": "int8_kv"',
           caught_by="a capped batch is cured"),
    Mutant("treat", "bigger steps for prompts", '"prompts": "prefix_cache"', '"prompts": "bigger_steps"',
           caught_by="prompts are cured"),
    Mutant("treat", "fewer rows at the knee", '"knee": "second_server"', '"knee": "fewer_rows"',
           caught_by="past the knee is cured"),
    Mutant("treat", "more rows at the knee", '"knee": "second_server"', '"knee": "more_rows"',
           caught_by="past the knee is cured"),
    Mutant("treat", "buys hardware against a setting", '"memory": "int8_kv"', '"memory": "second_server"',
           caught_by="a second server only where nothing cheaper helps"),
]

SURVIVORS = {}


def by_exclusion(records, settings):
    """A list of questions, each with a threshold; every step counts once."""
    steps = records.steps
    pool = sum(getattr(steps[0], f"blocks_{state}") for state in ("live", "cached", "free"))
    if mean(s.rows >= settings.max_batch for s in steps) > 0.4:
        return "batch_cap"
    if mean(s.prompt_tokens for s in steps) > 0.7 * settings.max_step_tokens:
        return "prompts"
    return "memory" if mean(s.blocks_live for s in steps) > 0.6 * pool else "knee"


def by_shares_of_time(records, settings):
    """For how much of the time each limit was as good as reached."""
    steps = records.steps
    busy = sum(s.duration for s in steps)

    def share(reached):
        return sum(s.duration for s in steps if reached(s)) / busy

    pool = steps[0].blocks_live + steps[0].blocks_cached + steps[0].blocks_free
    shares = {
        "memory": share(lambda s: s.blocks_live > 0.7 * pool),
        "batch_cap": share(lambda s: s.rows == settings.max_batch),
        "prompts": share(lambda s: s.prompt_tokens > 0.8 * settings.max_step_tokens),
    }
    first = max(shares, key=shares.get)
    return first if shares[first] > 0.5 else "knee"


def by_elimination(cause):
    if cause == "knee":
        return "second_server"
    return {"batch_cap": "more_rows", "memory": "int8_kv"}.get(cause, "prefix_cache")


def by_pairs(cause):
    causes, treatments = zip(("knee", "second_server"), ("prompts", "prefix_cache"), ("memory", "int8_kv"),
                             ("batch_cap", "more_rows"), strict=True)
    return treatments[causes.index(cause)]


ALTERNATIVES = {"diagnose": [by_exclusion, by_shares_of_time], "treat": [by_elimination, by_pairs]}
