"""Services in virtual time: nothing is lost between replicas, and what is asked for is what is simulated."""

from __future__ import annotations

import json

import pytest

from minillm.cli import main
from minillm.course.experiments.example import ARTICLES, SETUPS, beside_the_articles, worked_example_rows
from minillm.course.figures import service_row
from minillm.measure.service import Service, simulate
from minillm.measure.workload import make_workload

FEW = {"requests": 40, "scale": 0.1}


@pytest.mark.parametrize(
    "service",
    [Service(), Service(replicas=3), Service(kv_format="int8"), Service(acceptance=0.7), Service(prefill_replicas=1)],
    ids=["one", "three replicas", "int8", "speculation", "prefill apart"],
)
def test_every_token_of_the_workload_is_given(service):
    found = simulate("chat", service, **FEW)
    assert found["requests"] == {"finished": 40, "aborted": 0, "failed": 0, "unfinished": 0}
    assert found["output_tokens"] == sum(item.output_tokens for item in make_workload("chat", **FEW))
    assert found["devices"] == service.replicas + service.prefill_replicas
    assert found["latency_s"]["n"] == found["ttft_s"]["n"] == 40
    assert found["itl_per_token_s"]["n"] == found["output_tokens"] - 40


def test_more_replicas_thin_the_batch():
    one, four = (simulate("chat", Service(replicas=n), rate=50, **FEW)["batch"]["mean_rows"] for n in (1, 4))
    assert four < one


def test_drafts_that_are_mostly_right_make_one_user_faster():
    plain, guessed = (simulate("chat", Service(acceptance=share), 1, **FEW) for share in (None, 0.9))
    assert guessed["output_tokens_per_s"] > 1.5 * plain["output_tokens_per_s"]
    assert plain["speculation"]["drafted_tokens"] == 0 < guessed["speculation"]["accepted_tokens"]


def test_numbered_prompts_are_as_long_as_random_ones_and_share_nothing():
    found = simulate("chat", Service(), **FEW)
    assert found["prompt_tokens"] == sum(len(item.prompt_ids) for item in make_workload("chat", **FEW))
    assert found["cached_prompt_tokens"] == 0
    shared = simulate("shared-prefix", Service(), requests=20, prefix_tokens=256)
    assert shared["cached_prompt_tokens"] > 10 * 256


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ValueError, match="unknown device 'a9'; known: a100-80gb"):
        simulate("chat", Service("a9"), **FEW)
    with pytest.raises(ValueError, match="unknown workload 'chap'; known: yardstick"):
        simulate("chap", Service())
    with pytest.raises(ValueError, match="one replica"):
        simulate("chat", Service(replicas=2), clients=4, **FEW)
    with pytest.raises(ValueError, match="from 1 up"):
        simulate("chat", Service(replicas=0), **FEW)
    with pytest.raises(ValueError, match="max_batch 0"):
        simulate("chat", Service(max_batch=0), **FEW)
    with pytest.raises(ValueError, match="acceptance 1.5 must be a share"):
        simulate("chat", Service(acceptance=1.5), **FEW)
    with pytest.raises(ValueError, match="price_per_hour nan"):
        simulate("chat", Service(price_per_hour=float("nan")), **FEW)
    with pytest.raises(ValueError, match="clients 0"):
        worked_example_rows(Service(), clients=0)


def test_the_articles_stand_beside_ours_with_ratios():
    rows = worked_example_rows(Service(prompts_received=True), scale=0.05)
    assert [row["clients"] for row in rows] == [8, 111, 111, 220 - 1]  # weights counted, not rounded to 16 GB
    table = {row["figure"]: row for row in beside_the_articles(rows)}
    setups = [setup for setup, *_ in SETUPS]
    speeds = table["tokens/s"]
    assert [speeds[f"{setup}: articles"] for setup in setups] == [310, 2850, 3900]
    assert [speeds[f"{setup}: ours"] for setup in setups] == [rows[i]["tokens_per_s"] for i in (0, 2, 3)]
    ratios = beside_the_articles(rows)[3]
    assert ratios[f"{setups[1]}: articles"] == pytest.approx(9.2, abs=0.05)
    assert ratios[f"{setups[2]}: ours"] == pytest.approx(rows[3]["tokens_per_s"] / rows[0]["tokens_per_s"])
    assert ARTICLES[1]["cost_per_million_output_tokens"] == 0.28


def test_the_command(capsys):
    few = ["--requests", "20", "--scale", "0.05", "--json", "-"]
    assert main(["simulate", "chat", "--device", "l4", "--model", "smollm2-1.7b", *few]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (found["device"], found["requests"]["finished"]) == ("l4", 20)
    assert main(["simulate", "worked-example", *few]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert len(found["rows"]) == 4
    assert main(["simulate", "chat", "--device", "a9"]) == 2
    assert "known: a100-80gb" in capsys.readouterr().err


def test_a_closed_loop_is_shared_among_replicas():
    served = Service(replicas=2).serve(make_workload("lognormal", requests=8), clients=6)
    assert len(served.requests) == 8 and served.summary["requests"]["finished"] == 8
    assert max(step.rows for step in served.records.steps) == 3, "three clients at each of two replicas"


def test_what_a_service_refuses_is_counted_and_has_no_record():
    items = make_workload("lognormal", requests=8)
    served = Service(max_batch=1, max_waiting=2).serve(items)
    assert service_row(served, "refused", "refused_share") == {"refused": 6, "refused_share": 0.75}
    assert len([request for request in served.requests if request]) == 2 == len(served.records.requests)
    with pytest.raises(ValueError, match="at most one of"):
        Service(max_waiting=2).serve(items, clients=2)


def test_a_service_says_what_differs_from_the_usual_one():
    assert str(Service()) == "" and str(Service(kv_format="int8", replicas=2)) == "kv_format='int8', replicas=2"


def test_answers_are_capped_and_fewer_weights_leave_more_room():
    items = make_workload("lognormal", requests=8)
    assert Service(answer_cap=5).serve(items).summary["output_tokens"] == 40
    assert Service(weights=0.5).capacity().cache_gb == pytest.approx(Service().capacity().cache_gb + 8.03, abs=0.01)
    assert Service(weights=0.5).cost.weight_bytes == Service().cost.weight_bytes / 2
