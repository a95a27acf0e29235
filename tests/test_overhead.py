"""The engine's own memory does not grow with the requests it has served."""

from minillm.course.experiments.overhead import memory_kb, simulated, step_seconds


def test_memory_does_not_grow_over_a_thousand_requests():
    peaks = memory_kb(32, (2_048, 3_072))  # by then every block of the pool is in the prefix index, and dicts are grown
    assert peaks[3_072] < 1.03 * peaks[2_048]


def test_a_step_is_timed_with_the_queue_it_names():
    spread = step_seconds(batch=4, queued=10, steps=5, warmups=2)
    assert spread.repeats == 5 and 0 < spread.min <= spread.median <= spread.max


def test_virtual_time_s_own_speed_counts_the_work_of_the_run():
    row = simulated(chats=20, repeats=2)
    assert row["row_steps"] > 20 and 0 < row["min_per_s"] <= row["row_steps_per_s"] <= row["max_per_s"]
