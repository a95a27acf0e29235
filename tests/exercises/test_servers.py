"""Exercise 11's servers are ill of what their names say, and of nothing else."""

from __future__ import annotations

import pytest

from minillm.course.grading.servers import SERVERS, TREATMENTS, complaint, served

CURES = {"batch_cap": "more_rows", "memory": "int8_kv", "prompts": "prefix_cache", "knee": "second_server"}


@pytest.mark.parametrize("name", SERVERS)
def test_everybody_is_served_and_only_short_memory_sends_anybody_away(name):
    run = served(name, 3)
    requests, records = run.requests, run.records
    assert len(requests) == len(SERVERS[name].load(seed=3)) == len(records.requests)
    assert all(r.finish_reason == "stop" for r in requests)
    assert (records.totals["preempted"] > 0) == (name == "memory")


@pytest.mark.parametrize("name", SERVERS)
def test_one_treatment_cures_and_the_other_settings_do_not(name):
    before = complaint(name, 3)
    left = {treatment: complaint(name, 3, treatment) / before for treatment in TREATMENTS}
    assert left[CURES[name]] < 0.65
    others = left.keys() - {CURES[name], "second_server"}
    assert min(left[treatment] for treatment in others) > 0.8
