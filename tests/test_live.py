"""The live view shows what the engine's own gauges say, and nothing where nobody looks."""

from __future__ import annotations

import io
import threading
import time

import pytest
from fakes import fake_engine

from minillm.course.show import live
from minillm.measure.workload import WorkItem, play


def items(number: int = 6) -> list[WorkItem]:
    return [WorkItem(0.0, [i, 1, 2, 3], 5) for i in range(number)]


def test_readings_are_the_engine_s_gauges():
    engine, shown = fake_engine(max_batch=2, seconds=0.5), []
    gauges = live.Gauges(shown.append, every_s=0.0)
    play(engine, items(), clients=6, watch=gauges)
    assert shown[-1] == gauges.last and len(shown) == len(engine.records.steps)
    tokens = [reading["tokens"] for reading in shown]
    assert tokens[-1] == engine.records.totals["output_tokens"] == 30 and tokens == sorted(tokens)
    assert max(reading["running"] for reading in shown) == 2 and shown[0]["waiting"] == 4
    assert [reading["tokens_per_s"] for reading in shown[1:4]] == [4.0] * 3  # two rows, a step of half a second
    assert 0 < shown[0]["kv_share"] < 1 and shown[-1]["kv_share"] == 0


def test_looks_are_spaced_and_the_last_step_is_read():
    shown = []
    play(fake_engine(max_batch=2), items(), clients=6, watch=live.Gauges(shown.append, every_s=3600))
    assert [reading["tokens"] for reading in shown] == [2, 30]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_line_is_written_on_a_terminal_alone(stream, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(live.sys, "stderr", stream())
    with live.on_terminal("chat") as show:
        show({"tokens_per_s": 1234.5, "running": 3, "waiting": 2, "kv_share": 0.5})
    written = live.sys.stderr.getvalue()
    if stream is Terminal:
        assert "chat: 1,234 tokens/s, 3 running, 2 waiting, 50% of the cache held" in written
    else:
        assert written == ""


@pytest.mark.parametrize(("stream", "ci"), [(Terminal, False), (Terminal, True), (io.StringIO, False)])
def test_the_seconds_of_a_long_job_are_counted_on_a_terminal_alone(stream, ci, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setenv("CI", "1") if ci else monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(live.sys, "stderr", stream())
    threads = threading.active_count()
    with pytest.raises(ValueError, match="of the job"), live.ticking("knee", every_s=0.01):
        time.sleep(0.1)
        raise ValueError("of the job")
    written = live.sys.stderr.getvalue()
    assert threading.active_count() <= threads + 1  # tqdm keeps a monitor
    assert written.count("knee: 00:00") > 2 if stream is Terminal and not ci else written == ""


def test_a_client_s_line_says_what_a_client_sees():
    line = live.line({"seconds": 2.0, "tokens": 100, "in_flight": 3, "done": 4, "failed": 1})
    assert line == "50 tokens/s, 3 in flight, 4 done, 1 failed"


@pytest.mark.parametrize("nobody", ["CI", "TQDM_DISABLE"])
def test_a_bar_gives_all_items_and_is_silent_where_nobody_looks(nobody, monkeypatch, capsys):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    assert list(live.bar([3, 1, 2], "numbers")) == [3, 1, 2]
    assert "numbers" in capsys.readouterr().err
    monkeypatch.setenv(nobody, "1")
    assert list(live.bar([3, 1, 2], "numbers")) == [3, 1, 2]
    assert capsys.readouterr() == ("", "")
