"""The ledger: every verdict follows the rows, and a contrary measurement flips it."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

from minillm.cli import main
from minillm.course.catalogue import EXPERIMENTS
from minillm.course.ledger import LEDGER, as_markdown, as_rows, find_all
from minillm.course.verdicts import CONDITION, HOLDS, NOT_HERE, NOT_MEASURED, WATCHED, d5
from minillm.measure.measurement import EXACT, VIRTUAL, Measurement, Provenance

# For each claim that has a function: rows under which it holds, and one change that speaks against it, as
# (number of the row, column, value). A claim whose function is added is to be added here too.
CURVE = [{"rows": n, "step_ms": 10 + 0.1 * n, "tokens_per_s": n / (10 + 0.1 * n) * 1e3} for n in (1, 8, 32, 64)]
LOTS = [
    *({"phase": "prefill", "rows": n, "tokens_each": tokens, "tokens_per_s": rate, "mfu": rate / 2e4, "mbu": 0.1}
      for n, tokens, rate in ((1, 64, 5e3), (1, 2048, 1.5e4), (8, 64, 1.4e4))),
    *({"phase": "decode", "rows": n, "tokens_each": 1, "tokens_per_s": 100.0 * n, "mfu": 0.01 * n, "mbu": 0.8}
      for n in (1, 8)),
]  # fmt: skip
IDLE = [
    {"case": case, "batching": batching, "steps": 900, "idle_slot_steps": idle, "idle_share": share,
     "empty_while_waiting": 0}
    for case, batching, idle, share in (
        ("80 beside 800 tokens", "static", 720, 0.45), ("80 beside 800 tokens", "continuous", 0, 0.0),
        ("one of 800, seven of 40", "static", 5320, 0.83), ("one of 800, seven of 40", "continuous", 0, 0.0),
    )
]  # fmt: skip
SUMS = [
    {"model": "llama-3-8b", "kv_format": "bf16", "context_tokens": context, "memory_gb": 80.0, "weights_gb": 16.0,
     "overhead_gb": 4.0, "cache_gb": 60.0, "request_gb": 131072 * context / 1e9, "max_concurrent": fit}
    for context, fit in ((4096, 111), (2048, 223))
] + [
    {"model": name, "heads": 32, "kv_heads": heads, "formula_bytes": 16384 * heads, "stored_bytes": 16384 * heads,
     "times_without_gqa": 32 / heads}
    for name, heads in (("llama-3-8b", 8), ("llama-2-7b", 32))
]  # fmt: skip
CHATS = {"tokens_per_s": 500.0, "ttft_p50_s": 0.1, "mean_rows": 10.0, "busy_share": 1.0, "clients": 111}
EXAMPLE = [
    {"setup": setup, "clients": clients, "tokens_per_s": speed, "latency_p99_s": tail, "price_per_hour": 2.9,
     "cost_per_million_output_tokens": 2.9 / speed / 3600 * 1e6}
    for setup, clients, speed, tail in (
        ("static batch of 8", 111, 310.0, 9.0), ("continuous, paged", 111, 2850.0, 4.1),
        ("continuous, paged, 8-bit KV", 220, 3900.0, 6.8),
    )
]  # fmt: skip
DRAFTS = [
    *({"part": "step cost", "k": 4, "batch": batch, "times_plain": times} for batch, times in ((1, 1.2), (16, 2.1))),
    {"part": "sampling", "draws": 1000, "chi_square": 3.0, "limit": 22.46},
    *({"part": "real", "prompts": prompts, "drafts": "n-gram", "k": k, "batch": batch, "acceptance": 0.5,
       "speedup": speedup, "same_tokens": True}
      for prompts, k, batch, speedup in (("copy", 4, 1, 2.5), ("chat", 4, 1, 0.97), ("chat", 4, 16, 0.7),
                                         ("chat", "adaptive", 16, 0.98), ("copy", 4, 16, 1.4))),
    {"part": "crossover", "prompts": "chat", "drafts": "n-gram", "k": 4, "costs_from_batch": 16},
]  # fmt: skip
KV_FORMATS = [
    {"scheme": name, "share_of_16_bit": share, "change_percent": change, "change_error_percent": 0.1, "tokens": 12288,
     "copied_percent": copied, "found_in_1024_percent": 75.0, **{f"{part}_change_nats": nats for part, nats in losses},
     **{f"{part}_change_error_nats": 0.01 for part, _ in losses}}
    for name, share, change, copied in (
        ("fp32", 2.0, 0.0, 57.0), ("int8", 0.516, 0.1, 57.0), ("fp8", 0.516, 0.05, 56.0), ("int4", 0.25, 5.0, 40.0))
    for losses in [(("rare_tokens", 0.1), ("common_tokens", 0.02), ("at_2k_to_4k", 0.02), ("at_under_256", 0.02))]
]  # fmt: skip
PLANTED = {
    "C6": (KV_FORMATS, (1, "change_percent", 1.5)),
    "D1": (KV_FORMATS, (3, "share_of_16_bit", 0.4)),
    "D2": (KV_FORMATS, (3, "change_percent", 0.5)),
    "D4": (KV_FORMATS, (3, "rare_tokens_change_nats", 0.03)),
    "D5": (KV_FORMATS, (3, "copied_percent", 55.0)),
    "D3": (
        [{"weights": name, "rows": n, "read_mb": mb, "times_faster": times, "cache_tokens_in_1_gib": int(5000 - mb)}
         for name, mb, times in (("fp32", 538.0, 1.0), ("int8", 135.0, 2.0), ("int4", 88.0, 3.0)) for n in (1, 8)],
        (2, "times_faster", 0.9),
    ),
    "B9": (
        [{"replicas": n, "times_one": 1 + n / 8, "mean_rows": 40 / n} for n in (1, 2, 4, 8)],
        (3, "times_one", 7.9),
    ),
    "C1": (SUMS, (0, "max_concurrent", 112)),
    "C2": (SUMS, (2, "stored_bytes", 1)),
    "C5": (SUMS, (1, "max_concurrent", 111)),
    "C7": (SUMS, (3, "times_without_gqa", 4.0)),
    "C10": (SUMS, (0, "cache_gb", 10.0)),
    "C4": (
        [{"cache_gb": gb, "refused": n, "refused_share": n / 100, "cache_peak_share": share, "mfu": 0.2,
          "busy_share": 1.0} for gb, n, share in ((5, 30, 1.0), (60, 0, 0.1))],
        (0, "mfu", 0.9),
    ),
    "C9": (
        [{"kv": kv, "cap_tokens": cap, "mean_rows": rows, "latency_p99_s": tail} for kv, cap, rows, tail in
         (("slots", 8000, 5.0, 9.0), ("slots", 400, 20.0, 5.0), ("paged", 8000, 20.0, 6.0))],
        (1, "mean_rows", 5.0),
    ),
    "F1": (
        [{"clients": n, "tokens_per_s": 100.0 * n**0.5, "latency_p99_s": 2.0 + n / 16} for n in (1, 16, 256)],
        (2, "latency_p99_s", 2.0),
    ),
    "F2": (
        [{"layout": layout, "chat_ttft_p99_s": tail, "heap_tokens_per_s": 900.0}
         for layout, tail in (("mixed", 4.0), ("separate pools", 0.2))],
        (1, "chat_ttft_p99_s", 5.0),
    ),
    "F3": (
        [{"case": case, "latency_p99_s": tail, "queue_p99_s": queue} for case, tail, queue in (
            ("answers as they come", 20.0, 1.0), ("answers capped at 200", 5.0, 1.0), ("prompts computed", 9.0, 5.0),
            ("prompts cached", 4.0, 0.1))],
        (3, "queue_p99_s", 6.0),
    ),
    "F4": ([{"metric": name, "value": 1.0} for name in WATCHED], (2, "value", None)),
    "F5": (
        [{**CHATS, "setup": setup, "mean_rows": rows, "tokens_per_s": speed} for setup, rows, speed in
         (("slots for the longest answer", 3.0, 300.0), ("blocks as tokens appear", 40.0, 2500.0))],
        (1, "tokens_per_s", 310.0),
    ),
    "F6": (
        [{"symptom": name, "cure": "a cure", "times_better": 2.0} for name in ("slow", "dear")],
        (1, "times_better", 1.0),
    ),
    "F7": (
        [{**CHATS, "layout": layout, "itl_p99_ms": gap} for layout, gap in (("both on both", 90.0), ("apart", 12.0))],
        (1, "itl_p99_ms", 95.0),
    ),
    "G1": (EXAMPLE, (1, "tokens_per_s", 600.0)),
    "G2": (EXAMPLE, (2, "latency_p99_s", 3.0)),
    "G3": (EXAMPLE, (0, "cost_per_million_output_tokens", 1.0)),
    "A1": (
        [{"layers": n, "weight_mb": 10.0 * n, "step_ms": 1.0 * n, "mbu": 0.9, "mfu": 0.02} for n in (32, 16, 4)],
        (0, "mbu", 0.2),
    ),
    "A2": (LOTS, (2, "tokens_per_s", 9e4)),
    "A3": (LOTS, (4, "tokens_per_s", 300.0)),
    "A5": (
        [{"rows": n, "gauge": "NVML utilisation", "busy_percent": 97.0, "tokens_per_s": 50.0 * n, "mfu": 0.01 * n}
         for n in (1, 64)],
        (0, "busy_percent", 20.0),
    ),
    "A4": (
        [{"context_tokens": n, "recompute_ms": 1.0 * n, "cached_ms": 40 + n / 500} for n in (16, 64, 256, 1024)],
        (3, "recompute_ms", 9000.0),
    ),
    "B1": (CURVE, (1, "step_ms", 80.0)),
    "B2": (CURVE, (2, "tokens_per_s", 200.0)),
    "B3": (
        [{"clients": n, "tokens_per_s": n / (32 + n) * 1e3, "itl_p50_ms": 32.0 + n} for n in (1, 8, 32, 64, 128, 512)],
        (5, "itl_p50_ms", 200.0),
    ),
    "B4": (IDLE, (0, "idle_slot_steps", 0)),
    "B5": (IDLE, (3, "empty_while_waiting", 5)),
    "B6": (
        [{"part": part, "setup": setup, "times_static": times} for part in ("whole run", "answers only")
         for setup, times in (("continuous, slots", 1.5), ("continuous, paged", 2.5))],
        (1, "times_static", 0.9),
    ),
    "B7": ([{"cv": cv, "times_tokens_per_s": 1 + cv} for cv in (0.0, 1.0, 2.0)], (0, "times_tokens_per_s", 1.2)),
    "B8": (CURVE, (1, "tokens_per_s", 2000.0)),
    "C3": (
        [{"kv": "slots", "reserved_mb": 100.0, "wasted_share": 0.8, "mean_requests": 4.0},
         {"kv": "paged", "reserved_mb": 90.0, "wasted_share": 0.05, "mean_requests": 20.0}],
        (1, "wasted_share", 0.7),
    ),
    "C8": (
        [{"case": case, "prompt_tokens": 1000, "found": found, "ttft_p50_ms": ms}
         for case, found, ms in (("no sharing", 0, 90.0), ("shared prefix", 900, 20.0),
                                 ("first token changed", 0, 91.0))],
        (2, "found", 900),
    ),
    "E1": (DRAFTS, (4, "same_tokens", False)),
    "E2": (DRAFTS, (0, "times_plain", 3.0)),
    "E3": (DRAFTS, (3, "speedup", 1.2)),
    "E4": (DRAFTS, (5, "speedup", 1.0)),
}  # fmt: skip
JUDGED = {claim.id: claim for claim in LEDGER}


def source(device: str = "A GPU", driver: str = "1, CUDA 13") -> Provenance:
    return Provenance(device, driver, "2", "bf16", "m", "abc", "2026-01-01", 0, 1, 3)


def record(root, claim: str, rows: list[dict], **where) -> None:
    Measurement(JUDGED[claim].experiment, source(**where), rows).save(root)


def verdicts(root, claim: str) -> list[str]:
    return [finding.verdict for finding in find_all(root, (JUDGED[claim],))]


def test_every_judged_claim_has_an_experiment_and_a_planted_contrary_here():
    assert set(PLANTED) == set(JUDGED)
    assert all(claim.experiment for claim in JUDGED.values())


def test_every_claim_is_there_once_and_no_experiment_names_another():
    ids = [claim.id for claim in LEDGER]
    numbers = {"A": 5, "B": 9, "C": 10, "D": 5, "E": 4, "F": 7, "G": 3}
    assert ids == [f"{part}{n}" for part, last in numbers.items() for n in range(1, last + 1)]
    named = [claim for experiment in EXPERIMENTS.values() for claim in experiment.claims]
    assert len(named) == len(set(named)) and set(named) <= set(ids)


@pytest.mark.parametrize("claim", PLANTED)
def test_a_planted_contrary_measurement_flips_the_verdict(tmp_path, claim):
    rows, (number, column, value) = PLANTED[claim]
    record(tmp_path, claim, rows)
    assert verdicts(tmp_path, claim) in ([HOLDS], [CONDITION])
    contrary = deepcopy(rows)
    assert column in contrary[number]
    contrary[number][column] = value
    record(tmp_path, claim, contrary)
    assert verdicts(tmp_path, claim) == [NOT_HERE]


@pytest.mark.parametrize("claim", PLANTED)
def test_the_verdict_names_what_was_measured_or_what_is_missing(tmp_path, claim):
    record(tmp_path, claim, PLANTED[claim][0])
    (finding,) = find_all(tmp_path, (JUDGED[claim],))
    assert any(character.isdigit() for character in finding.measured)
    record(tmp_path, claim, [])
    (finding,) = find_all(tmp_path, (JUDGED[claim],))
    assert finding.verdict == NOT_MEASURED and JUDGED[claim].experiment in finding.measured


@pytest.mark.parametrize("claim", PLANTED)
def test_rows_that_were_edited_cost_a_claim_its_verdict_and_nobody_theirs(tmp_path, claim):
    rows, (_, column, _) = PLANTED[claim]
    record(tmp_path, claim, rows)
    (path,) = tmp_path.glob("*/*.json")
    stored = json.loads(path.read_text())
    for damage in ({}, [], "x", None):
        path.write_text(json.dumps({**stored, "rows": [{**row, column: damage} for row in rows]}))
        (finding,) = find_all(tmp_path, (JUDGED[claim],))
        assert finding.measured
    path.write_text(json.dumps({**stored, "rows": [{k: v for k, v in row.items() if k != column} for row in rows]}))
    (finding,) = find_all(tmp_path, (JUDGED[claim],))
    assert finding.verdict == NOT_MEASURED and JUDGED[claim].experiment in finding.measured


def test_a_verdict_on_rows_that_a_budget_cut_says_so(tmp_path):
    for rows in (CURVE, []):
        Measurement(JUDGED["B1"].experiment, source(), rows, cut_at_s=60.0).save(tmp_path)
        (finding,) = find_all(tmp_path, (JUDGED["B1"],))
        assert finding.measured.endswith("cut at its budget of 60 s: rows are missing")


def test_codes_are_judged_over_all_lengths_since_one_has_few():
    """D5: in one length int4 finds fewer than fp32, in the other more; over both it loses nothing."""
    rows = [row | {"copied_percent": 57.0, "found_in_512_percent": 50.0} for row in KV_FORMATS]
    rows[3] |= {"found_in_512_percent": 75.0, "found_in_1024_percent": 50.0}
    assert d5(rows).word == NOT_HERE
    rows[3]["found_in_512_percent"] = 50.0
    assert d5(rows).measured == "int4: perplexity +5.00 % (+-0.10), while finding codes falls from 62 to 50 %"


def test_each_device_has_its_own_verdict(tmp_path):
    rows, (number, column, value) = PLANTED["B1"]
    record(tmp_path, "B1", rows)
    contrary = deepcopy(rows)
    contrary[number][column] = value
    record(tmp_path, "B1", contrary, device="A CPU", driver="Linux, AVX2")
    record(tmp_path, "B1", rows, device=VIRTUAL, driver="none")
    record(tmp_path, "B1", rows, device=EXACT, driver="none")
    found = {finding.kind: finding.verdict for finding in find_all(tmp_path, (JUDGED["B1"],))}
    assert found == {"GPU": HOLDS, "CPU": NOT_HERE, VIRTUAL: HOLDS, EXACT: HOLDS}


def test_a_condition_is_named(tmp_path):
    record(tmp_path, "B1", [{"rows": 1, "step_ms": 10.0}, {"rows": 8, "step_ms": 25.0}])
    (finding,) = find_all(tmp_path, (JUDGED["B1"],))
    assert finding.verdict == CONDITION
    assert finding.measured.endswith("condition: a step of eight takes 2.50 times as long")


def test_a_file_that_is_refused_settles_nothing(tmp_path):
    record(tmp_path, "B1", CURVE)
    (path,) = tmp_path.glob("*/*.json")
    path.write_text(path.read_text().replace('"commit": "abc"', '"commit": ""'))
    (finding,) = find_all(tmp_path, (JUDGED["B1"],))
    assert finding.verdict == NOT_MEASURED and "no commit is named" in finding.measured


def test_without_files_every_claim_says_what_to_run(tmp_path, capsys):
    assert main(["claims", "--root", str(tmp_path), "--json", "-"]) == 0
    claims = json.loads(capsys.readouterr().out.splitlines()[-1])["claims"]
    assert len(claims) == len(LEDGER) and {claim["verdict"] for claim in claims} == {NOT_MEASURED}
    assert all(claim["measured"] for claim in claims)


def test_the_table_has_a_line_for_each_finding(tmp_path, capsys):
    record(tmp_path, "C3", PLANTED["C3"][0])
    assert main(["claims", "C3", "B1", "--root", str(tmp_path), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "| memory_by_policy | holds | GPU: A GPU |" in lines[2] and lines[2].startswith("| C3 |")
    assert as_markdown(find_all(tmp_path)).count("\n") == 1 + len(as_rows(find_all(tmp_path)))


def test_an_unknown_claim_is_refused(capsys):
    assert main(["claims", "Z9"]) == 2
    assert "unknown claim 'Z9'; known: A1, A2" in capsys.readouterr().err
