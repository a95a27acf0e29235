"""A newcomer's first day: commands answer quickly, a busy machine is named, a picture that fails costs a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import tiny_model

from minillm.cli import main
from minillm.course.experiments.batching import knee
from minillm.course.setting import Setting
from minillm.course.show import live
from minillm.course.show.recorded import heading
from minillm.measure.measurement import Measurement, Provenance, Watch, device_name, measurement_path, time_seconds
from minillm.measure.roofline import Ceilings

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "transformers", "httpx", "matplotlib")  # each takes longer to import than an answer may


def fresh(code: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a process of its own, with this checkout's package."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)


# -- commands that compute nothing ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "shown"),
    [("--help", "capacity"), ("measure --list", "knee"), ("bench --nope", "unrecognized arguments: --nope"),
     ("ladder --help", "--threads"), ("nonsense", "invalid choice"), ("simulate", "required: workload")],
)
def test_help_lists_and_complaints_import_nothing_heavy(command, shown):
    run = fresh(
        f"import sys\nfrom minillm.cli import main\ntry:\n    main({command.split()!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert run.returncode == 0 and shown in run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


def test_the_package_s_names_are_there_when_they_are_used():
    run = fresh(
        "import sys, minillm; assert 'torch' not in sys.modules\n"
        "assert set(minillm.__all__) <= set(dir(minillm))\n"
        "for name in minillm.__all__: getattr(minillm, name)\n"
        "from minillm import Engine; assert minillm.Engine is Engine and minillm.metrics.summary\n"
        "try: minillm.nonsense\nexcept AttributeError as error: print(error)"
    )
    assert run.stdout == "module 'minillm' has no attribute 'nonsense'\n", run.stderr


# -- long work says that it is alive --------------------------------------------------------------


def test_where_there_is_no_terminal_a_bar_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    now = [0.0]
    monkeypatch.setattr(live.time, "perf_counter", lambda: now[0])
    with live.Log("rung 2", 36) as bar:
        for _ in range(36):
            now[0] += live.LOG_EVERY_S / 4.5
            bar.update(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rung 2" and lines[1] == "rung 2: 5 of 36" and 7 <= len(lines) <= 9
    with live.on_terminal("chat") as show:
        for tokens in range(10):
            now[0] += live.LOG_EVERY_S / 2
            show({"tokens_per_s": float(tokens), "running": 1, "waiting": 0, "kv_share": 0.5})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and lines[0].startswith("chat: 1 tokens/s, 1 running")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    live.Log("rung 2", 36)
    assert capsys.readouterr().err == ""


def test_bench_says_what_it_will_do_before_it_does_it(monkeypatch, capsys):
    def run(*arguments, **settings):
        assert "peers on random:tiny: this engine, then transformers, in 4 turns" in capsys.readouterr().out
        raise ValueError("far enough")

    monkeypatch.setattr("minillm.measure.bench.bench", run)
    assert main(["bench", "--model", "random:tiny", "--against", "transformers"]) == 2


# -- a busy machine -------------------------------------------------------------------------------


class Clocks:
    """Wall and processor time of a run that gets a share of what its threads could use."""

    def __init__(self, monkeypatch, share: float, threads: int = 2, workers: int = 2) -> None:
        self.now, self.share, self.workers = 0.0, share, workers
        monkeypatch.setattr("torch.get_num_threads", lambda: threads)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "thread_time", lambda: self.now * self.share)
        monkeypatch.setattr(time, "process_time", lambda: self.now * self.share * self.workers)


@pytest.mark.parametrize(
    ("share", "workers", "busy"),
    [(0.99, 2, False), (0.65, 2, True), (0.5, 2, True), (0.99, 1, False)],  # one worker: Python alone, or one thread
)
def test_processor_time_that_others_took_is_seen(share, workers, busy, monkeypatch):
    clocks, watch = Clocks(monkeypatch, share, workers=workers), Watch()
    for _ in range(3):
        with watch:
            clocks.now += 10.0
        clocks.now += 100.0  # between the runs, which does not count
    found = watch.found()
    assert found["busy"] is busy and found["cpu_share"] == pytest.approx(share)
    assert not watch.found(on_cpu=False)["busy"], "a GPU's run waits, and uses no processor"


def test_waiting_for_a_disk_is_left_out(monkeypatch):
    clocks, watch = Clocks(monkeypatch, share=1.0), Watch()
    with watch.paused():
        clocks.now += 1.0  # before the run
    with watch:
        clocks.now += 1.0
        with watch.paused():
            clocks.now, clocks.share = clocks.now + 8.0, 0.2
        clocks.share = 1.0
    assert watch.wall == pytest.approx(2.0 - 1.0)


def steps(*durations: float, **size: int) -> list[SimpleNamespace]:
    shape = {"prompt_tokens": 0, "decode_tokens": 8, "recomputed_tokens": 0, "drafted_tokens": 0, "idle_rows": 0,
             "kv_tokens": 400, **size}
    return [SimpleNamespace(duration=duration, **shape) for duration in durations]


def test_steps_of_equal_size_that_differ_are_seen_and_steps_of_other_sizes_are_not_compared():
    watch = Watch()
    watch.compare_steps([*steps(*[0.040, 0.046] * 20), *steps(*[0.4] * 20, decode_tokens=0, prompt_tokens=256),
                         *steps(*[0.09] * 20, kv_tokens=4000), *steps(0.01, 0.9, decode_tokens=3)])
    assert not watch.found()["busy"] and watch.found()["slow_steps"] == pytest.approx(1.15)
    watch.compare_steps(steps(*[0.040, 0.230, 0.3] * 8))
    assert watch.found()["busy"] and watch.found()["slow_steps"] > 5


def test_a_record_says_that_the_machine_was_busy_and_with_which_numbers(tmp_path):
    source = Provenance("Some CPU, 2 threads, AVX2, 12 GB/s", "Linux 6, AVX2", "2", "fp32", "m", "abc", "2026-01-01",
                        0, 0, 1, busy=True, cpu_share=0.65, slow_steps=4.5)
    busy = Measurement("knee", source, [{"clients": 1}])
    busy.save(tmp_path)
    again = Measurement.load(source.device, "knee", tmp_path)
    assert again == busy and heading(again).endswith(", made on a busy machine")
    assert again.disturbed == (
        "this machine was busy: the run got 65% of the processor time that its threads could use and the slowest "
        "tenth of equal steps took 4.5 times as long as the fastest"
    )


@pytest.fixture
def unfair(monkeypatch):
    """Half of the processor time goes to others, as the clocks tell it."""
    monkeypatch.setattr(time, "thread_time", lambda: time.perf_counter() / 2)
    monkeypatch.setattr(time, "process_time", lambda: time.perf_counter() / 2)


def test_an_experiment_on_a_busy_machine_says_so_in_its_record(unfair, monkeypatch):
    monkeypatch.setattr(Setting, "model", tiny_model(vocab_size=49_152))
    monkeypatch.setattr(Setting, "measure_ceilings", lambda self: Ceilings(1e15, 1e15))
    assert knee(Setting(quick=True)).provenance.busy


def test_the_ladder_on_a_busy_machine_says_so_and_what_to_do(unfair, monkeypatch, capsys):
    monkeypatch.setattr("minillm.load_model", lambda name: tiny_model())
    spelled = SimpleNamespace(chat=lambda text: [ord(letter) % 64 for letter in text])
    monkeypatch.setattr("minillm.load_tokenizer", lambda name: spelled)
    main(["ladder", "--model", "tiny", "--requests", "3", "--max-tokens", "4"])
    shown = capsys.readouterr().out
    assert "this machine was busy: the run got 50% of the processor time" in shown and "--threads 1" in shown


@pytest.mark.parametrize(
    ("threads", "complaint"), [("1", ""), ("0", "threads 0 must be"), ("-2", "threads -2 must be")]
)
def test_threads_can_be_limited(threads, complaint, monkeypatch, capsys):
    limited = []
    monkeypatch.setattr("torch.set_num_threads", limited.append)
    status = main(["generate", "hi", "--model", "random:nonsense", "--threads", threads])
    assert status == 2 and complaint in capsys.readouterr().err
    assert limited == ([1] if not complaint else [])


@pytest.mark.slow
def test_a_real_neighbour_is_noticed():
    """Where every core has a busy process beside ours."""
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    try:
        watch = Watch()
        with watch:
            time_seconds(lambda: sum(range(200_000)), "cpu", repeats=200)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert watch.found()["busy"] and watch.found()["cpu_share"] < 0.7


# -- which machine it was -------------------------------------------------------------------------


def test_a_processor_is_named_with_what_decides_its_speed(monkeypatch):
    for capability, speed in (("AVX2", 9.6), ("AVX512", 41.2)):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda capability=capability: capability)
        monkeypatch.setattr("minillm.measure.measurement._copy_gb_per_s", lambda threads, speed=speed: speed)
        assert device_name("cpu").endswith(f"threads, {capability}, {speed:.0f} GB/s")
    assert device_name("virtual time") == "virtual time"
    monkeypatch.undo()
    assert device_name("cpu") == device_name("cpu"), "measured once"


def test_the_bandwidth_names_no_folder_since_it_is_another_in_each_process():
    at = [measurement_path(f"AMD EPYC, 2 threads, AVX512, {speed} GB/s", "knee").parent.name for speed in (9, 21)]
    assert at == ["amd-epyc-2-threads-avx512"] * 2
    assert measurement_path("AMD EPYC, 2 threads", "knee").parent.name == "amd-epyc-2-threads"
    assert measurement_path("Some GPU 80GB", "knee").parent.name == "some-gpu-80gb"


def test_an_older_record_shows_the_instruction_set_that_it_noted_elsewhere():
    old = Provenance("AMD EPYC, 2 threads", "Linux 6.18, AVX512", "2", "fp32", "m", "abc", "2026-01-01", 0, 0, 1)
    assert old.label == "AMD EPYC, 2 threads, AVX512"
    new = Provenance("AMD EPYC, 2 threads, AVX2, 12 GB/s", "Linux 6.18, AVX2", "2", "fp32", "m", "abc", "", 0, 0, 1)
    gpu = Provenance("NVIDIA A100", "550, CUDA 12.8", "2", "bf16", "m", "abc", "", 0, 0, 1)
    assert (new.label, gpu.label) == (new.device, "NVIDIA A100")


# -- pictures and sliders, where a host lacks what they are shown with ----------------------------


@pytest.mark.parametrize("backend", ["module://matplotlib_inline_of_another_host.backend", "nonsense", "qtagg", "Agg"])
def test_pictures_are_drawn_whatever_backend_the_host_has_chosen(backend, tmp_path):
    run = fresh(
        "from minillm.course.show.plots import bars\n"
        "figure = bars([{'kv': 'slots', 'used': 1}], 'kv', {'used': 'used'}, 'title', 'MB')\n"
        "figure.savefig('a.png'); print(figure._repr_png_()[:4])", cwd=tmp_path, MPLBACKEND=backend,
    )
    assert run.stdout == "b'\\x89PNG'\n", run.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_fails_costs_a_warning_and_no_experiment(monkeypatch, tmp_path, capsys):
    from minillm.course import catalogue
    from minillm.course.show import plots
    from minillm.measure.measurement import provenance

    def experiment(name):
        monkeypatch.setattr("minillm.measure.measurement.current_commit", lambda: "abc")
        source = provenance("m", "fp32", "virtual time", 0, None)
        return catalogue.Experiment(name, lambda setting: Measurement(name, source, [{"number": 1}]), "numbers")

    def broken(rows):
        raise RuntimeError("no fonts here")

    monkeypatch.setattr(catalogue, "EXPERIMENTS", {name: experiment(name) for name in ("knee", "last")})
    monkeypatch.setattr(plots, "PICTURES", {"knee": broken})
    assert main(["measure", "--out", str(tmp_path)]) == 0
    assert "knee.png could not be drawn: RuntimeError: no fonts here" in capsys.readouterr().err
    assert {path.name for path in tmp_path.glob("*/*")} == {"knee.json", "last.json"}


WITHOUT_WIDGETS = "import sys; sys.modules['ipywidgets'] = None\n"


def test_every_panel_shows_its_first_picture_where_ipywidgets_is_not_installed():
    run = fresh(WITHOUT_WIDGETS + """
from minillm.course.experiments.common import count
from minillm.course.show import explore, widgets
from minillm.load.config import ModelConfig
from minillm.measure.workload import lognormal

records = count(ModelConfig.preset("smollm2-135m"), lognormal(1.0, 4, 6, 8), max_batch=2)

class Letters:
    def decode(self, ids):
        return "x" * len(ids)

for _ in range(2):  # a cell that is run again
    panels = [widgets.schedule_stepper(records, start=2), widgets.pool_explorer(), widgets.capacity_explorer(),
              widgets.draft_stepper(Letters(), [explore.DraftRound([2, 3], 1, [2, 9])])]
print([list(panel._repr_mimebundle_()) for panel in panels])
panels[0].close()
""")
    assert run.stdout == "[['image/png'], ['image/png'], ['image/png'], ['text/html']]\n", run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", ["03_continuous_batching", "04_paged_kv", "06_speculative", "08_capacity"])
def test_a_page_runs_where_ipywidgets_is_not_installed(page, smollm2_dir):
    source = ROOT / "notebooks" / "src" / f"{page}.py"
    run = fresh(WITHOUT_WIDGETS + f"import runpy; runpy.run_path({str(source)!r})", MINILLM_QUICK="1")
    assert run.returncode == 0, run.stderr


# -- whose measurements, and where the ledger finds them ------------------------------------------


def curve(device: str, eight_ms: float, **more) -> Measurement:
    source = Provenance(device, "Linux 6, AVX2", "2", "fp32", "m", "abc", "2026-01-01", 0, 0, 1, **more)
    rows = [{"rows": rows, "step_ms": ms, "tokens_per_s": 1e3 * rows / ms} for rows, ms in ((1, 20.0), (8, eight_ms))]
    return Measurement("batch_curve", source, rows)


@pytest.fixture
def recorded_elsewhere(tmp_path, monkeypatch):
    """A checkout with a record of another machine; the current folder is a user's own."""
    monkeypatch.setattr("minillm.course.commands.MEASUREMENTS", tmp_path / "checkout")
    curve("Some CPU", 24.0).save(tmp_path / "checkout")
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path


def said(capsys, *arguments: str) -> list[str]:
    assert main(["claims", "B1", *arguments]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(" B1")]


def test_claims_reads_what_measure_wrote_here_beside_the_checkout_s_and_says_whose_it_is(recorded_elsewhere, capsys):
    assert ["on Some CPU" in line for line in said(capsys)] == [True]
    curve("My CPU", 200.0).save(Path("measurements"))
    mine, theirs = said(capsys)
    assert mine.endswith("(yours, measurements/)")
    assert "on Some CPU" in theirs and theirs.endswith("(recorded with this checkout)")
    assert len(said(capsys, "--root", str(recorded_elsewhere / "checkout"))) == 1, "a named folder is read alone"


def test_not_measured_is_said_once_and_only_where_nobody_has_measured(recorded_elsewhere, capsys):
    Path("measurements").mkdir()
    assert [line.endswith("(recorded with this checkout)") for line in said(capsys)] == [True]
    for file in recorded_elsewhere.glob("checkout/*/*.json"):
        file.unlink()
    assert len(lines := said(capsys)) == 1 and "NOT MEASURED" in lines[0]
    curve("My CPU", 24.0).save(Path("measurements"))
    assert [line.endswith("(yours, measurements/)") for line in said(capsys)] == [True]


def test_a_page_does_not_judge_what_a_busy_machine_measured(tmp_path):
    from minillm.course.show.recorded import ledger

    busy = curve("My CPU", 200.0, busy=True, cpu_share=0.6)
    assert "    here: not measured: this machine was busy: the run got 60%" in ledger({"B1": busy}, tmp_path)
    quiet = curve("My CPU", 24.0, cpu_share=0.99)
    assert ledger({"B1": quiet}, tmp_path) == ledger({"B1": quiet.rows}, tmp_path)


# -- opening the course, and installing it --------------------------------------------------------


def test_every_way_to_open_jupyterlab_has_the_exercises_below_its_root_and_opens_the_first_page():
    """A link from a page to ../exercises leads nowhere in a server whose root is notebooks/."""
    commands = {
        name: next(line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if "-m jupyterlab" in line)
        for name in ("Makefile", "README.md")
    }
    installer = (ROOT / "notebooks/room/install.py").read_text(encoding="utf-8")
    assert "-m jupyterlab {HERE} " in installer  # the kit's own root
    for text in (*commands.values(), installer):
        page = text.partition("--LabApp.default_url=/lab/tree/")[2].split()[0].strip('")')
        assert (ROOT / page).is_file() and page.startswith("notebooks/00")
    assert all(line.split("jupyterlab ")[1].split()[0] == "." for line in commands.values())


@pytest.mark.slow
def test_a_clone_beside_a_script_does_not_hide_an_editable_install(tmp_path):
    """setuptools' import hook would come after the script's folder; an entry in Python's path comes with it."""
    clone, target = tmp_path / "minillm", tmp_path / "site"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_bytes((ROOT / name).read_bytes())
    (clone / "minillm").mkdir()
    (clone / "minillm/__init__.py").write_text('__version__ = "0.1.0"\n')
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target]
    run = subprocess.run([*pip, "-e", clone], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (tmp_path / "script.py").write_text("import minillm; print(minillm.__version__)\n")
    start = f"import site, runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); site.addsitedir({str(target)!r}); "
    run = subprocess.run([sys.executable, "-S", "-c", start + "runpy.run_path('script.py')"], cwd=tmp_path,
                         capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert run.stdout == "0.1.0\n", run.stderr


# -- the ladder's table can be read and recomputed ------------------------------------------------


def test_the_readme_s_ratios_are_those_of_the_speeds_beside_them():
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("x before")[2].splitlines()[2:10]
    assert [line[0] for line in table] == list("01234546")
    rows = [re.split(r"  +", line) for line in table]
    speeds = [float(row[1].split()[0]) for row in rows]
    for place, row in enumerate(rows):
        if row[2] != "-":
            assert float(row[2]) == pytest.approx(speeds[place] / speeds[place - 1], rel=0.02)
    assert [row[2] for row in rows].count("-") == 2


def test_every_column_of_the_ladder_is_explained_below_it():
    from minillm.course.experiments.ladder import COLUMNS

    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- ladder -->")[2].partition("<!-- end -->")[0]
    notes = text.partition("Rung 0 ran")[2]
    titles = ("tokens/s", "x before", "TTFT", "latency", "mean batch", "KV MB", "same tokens")
    assert len(COLUMNS) == 1 + len(titles) and all(f"{title}" in notes for title in titles)
