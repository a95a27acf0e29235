"""The commands whose work is the course's: `cli/` has their parsers, and these run what was parsed.

Each takes the parsed arguments, prints, and returns the exit status.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from minillm.course import catalogue, ledger
from minillm.course.experiments import batching, example, overhead
from minillm.course.experiments import ladder as rungs
from minillm.course.grading import class_guesses, classroom, handout, report
from minillm.course.grading.exercises import load_all
from minillm.course.grading.text import printable, say
from minillm.course.setting import NotHere, Setting
from minillm.course.show.live import ticking
from minillm.course.show.output import bar, say_if_busy, write, write_json
from minillm.course.show.recorded import heading
from minillm.course.show.tables import cell, filled, tables, text_table
from minillm.fast.memory import native_format
from minillm.guard.inputs import check_at_least
from minillm.measure.measurement import MEASUREMENTS, Measurement, device_name
from minillm.measure.service import Service

OWN = "measurements"  # the folder, here, of what `measure` writes without --save
OVERHEAD_COLUMNS = {
    "batch_rows": "rows", "queued": "queued", "step_ms": "step ms", "min_ms": "min", "max_ms": "max",
}
DECODE_COLUMNS = {
    "engine": "engine", "batch": "batch", "context_tokens": "context", "step_ms": "step ms", "min_ms": "min",
    "max_ms": "max", "least_ms": "least ms", "tokens_per_s": "tokens/s", "mbu": "MBU", "mfu": "MFU",
}


# -- measure, claims ------------------------------------------------------------------------------


def measure(arguments) -> int:
    """Status 1 if an experiment failed."""
    if arguments.save and (arguments.quick or arguments.out):
        raise ValueError("--save is for full sizes, in their own place: leave out --quick and --out")
    check_at_least(0, budget_s=arguments.budget_s)
    asked = [catalogue.find(name).name for name in arguments.names]
    names = catalogue.in_running_order() if arguments.all or not asked else asked
    root = MEASUREMENTS if arguments.save else Path(arguments.out or OWN)
    root.mkdir(parents=True, exist_ok=True)  # where that is refused, now rather than after the first experiment
    found, failed = _run_all(arguments, names, root)
    if arguments.json:
        done = [asdict(measurement) for measurement in found]
        result = done[0] if len(names) == len(done) == 1 else {"measurements": done, "failed": failed}
        write_json(arguments.json, result)
    return 1 if failed else 0


def _run_all(arguments, names: list[str], root: Path) -> tuple[list[Measurement], dict[str, str]]:
    """Run them in turn, whatever becomes of each; the measurements, and what went wrong by name."""
    from minillm.course.show.plots import PICTURES  # here, so that a missing matplotlib is said before anything runs

    setting = Setting(arguments.quick, arguments.model, arguments.device, progress=bar, budget_s=arguments.budget_s)
    found, failed, began = [], {}, time.perf_counter()
    for number, name in enumerate(names):
        try:
            if arguments.resume and (known := catalogue.recorded_here(name, setting, root)):
                print(f"{name}: this commit has it already" + f", {known.missing}" * bool(known.missing) + "\n")
                continue
            with ticking(_so_far(number, names, began)):
                outcome = catalogue.run_experiment(name, setting)
            _print_rows(name, outcome.measurement)  # before they are checked: what took minutes is seen in any case
            path = outcome.measurement.save(root)
        except NotHere as reason:
            print(f"{name} is left out: {reason}\n")
            continue
        except Exception as error:  # one that fails must not take the others with it
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {failed[name]}\n", file=sys.stderr)
            continue
        found.append(outcome.measurement)
        if name in PICTURES:
            _draw(PICTURES[name], outcome.measurement.rows, path.with_suffix(".png"))
        print(f"{outcome.report(arguments.budget_s)}; written to {path}")
        say_if_busy(outcome.measurement.disturbed)
        print(flush=True)
    return found, failed


def _print_rows(name: str, measurement: Measurement) -> None:
    """Where the rows were made, and their tables."""
    rows, chosen = measurement.rows, catalogue.find(name).columns
    print(f"{name}: {heading(measurement)}")
    print("\n\n".join(text_table(rows, filled(rows, each)) for each in chosen) if chosen else tables(rows), flush=True)


def _so_far(done: int, names: list[str], began: float) -> str:
    """Where the whole list stands, and what runs now."""
    name = names[done]
    if len(names) == 1:
        return f"{name}, {catalogue.find(name).about}"
    filled_part = 20 * done // len(names)
    return (f"[{'#' * filled_part:-<20}] {done} of {len(names)} done, {time.perf_counter() - began:,.0f} s so far, now "
            f"{name}")


def _draw(draw: Callable, rows: list[dict], picture: Path) -> None:
    """The picture beside its file; one that fails costs a warning, and no measurement."""
    try:
        draw(rows).savefig(picture, dpi=110, bbox_inches="tight")
        print(f"drawn in {picture}")
    except Exception as error:
        print(f"{picture} could not be drawn: {type(error).__name__}: {error}", file=sys.stderr)


def claims(arguments) -> int:
    """The verdicts on the ledger's claims: on your own measurements in this folder, and on those of the checkout."""
    known = {claim.id: claim for claim in ledger.LEDGER}
    for name in arguments.ids:
        if name not in known:
            raise ValueError(f"unknown claim {name!r}; known: {', '.join(known)}")
    if arguments.root and not Path(arguments.root).is_dir():
        raise ValueError(f"--root {arguments.root} is not a folder")
    asked = [known[name] for name in arguments.ids or known]
    found = [pair for claim in asked for pair in _findings(claim, arguments.root)]
    findings = [finding for finding, _ in found]
    rows = [{**row, "whose": whose} for row, (_, whose) in zip(ledger.as_rows(findings), found, strict=True)]
    if arguments.markdown:
        print(ledger.as_markdown(ledger.find_all(arguments.root or MEASUREMENTS, tuple(asked))))
    elif arguments.audit:
        print(ledger.as_audit(findings, shutil.get_terminal_size().columns))
    else:
        for row in rows:
            said = row["verdict"].removesuffix(" here").upper()  # the device follows, and may be another
            print(f"{row['id']:>3}  {said} on {cell(row['device'] or None)}{row['whose']}")
            print(f"     {row['claim']}\n     {row['measured']}\n")
    write_json(arguments.json, {"claims": rows})
    return 0


def _findings(claim: ledger.Claim, root: str | None) -> list[tuple[ledger.Finding, str]]:
    """The claim's findings, and whose measurement each is on; without a root, your own in this folder first."""
    roots, own = {"": Path(root or MEASUREMENTS)}, Path(OWN)
    if root is None and own.is_dir() and not (MEASUREMENTS.is_dir() and own.samefile(MEASUREMENTS)):
        roots = {f" (yours, {OWN}/)": own, " (recorded with this checkout)": MEASUREMENTS}
    found = [(finding, whose) for whose, place in roots.items() for finding in ledger.find_all(place, (claim,))]
    return [pair for pair in found if pair[0].device] or found[-1:]  # "not measured" is said once, and only if it is so


# -- ladder, bench decode, overhead, simulate worked-example --------------------------------------


def ladder(arguments) -> int:
    """Status 1 if an exact rung's tokens differ where the two likeliest logits are not as good as tied."""
    from minillm import load_model, load_tokenizer

    check_at_least(1, requests=arguments.requests, max_tokens=arguments.max_tokens)
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    requests, max_tokens = arguments.requests or rungs.REQUESTS, arguments.max_tokens or rungs.MAX_TOKENS
    items = rungs.chat_requests(tokenizer, requests, max_tokens)
    print(f"{arguments.model} in {native_format(model.dtype)} on {device_name(model.device)}")
    print(f"{rungs.describe(items)}. Every rung, {rungs.TURNS} times in turns:", flush=True)
    result = rungs.ladder(model, tokenizer, arguments.model, items, arguments.kv_memory, bar)
    print(f"\n{rungs.ladder_table(result.rows)}\n\n{rungs.ladder_notes(result.rows)}")
    for row in result.rows:
        for d in row["divergences"]:
            print(f"rung {row['rung']}, request {d['request']}: first differs at token {d['token']}, where the two "
                  f"likeliest logits lie {d['top2_margin']:.2g} apart "
                  f"(forgiven up to {rungs.MARGIN_TOLERANCE[model.dtype]:g})")
    write(arguments, result, {"device": result.provenance.device, "model": arguments.model, "rungs": result.rows})
    return 1 if any(row["identical"] is False for row in result.rows) else 0


def decode(arguments) -> int:
    """`bench decode`: steps by batch."""
    try:
        batches = [int(part) for part in arguments.batch.split(",")]
    except ValueError:
        raise ValueError(f"--batch {arguments.batch!r}: give whole numbers with commas, such as 1,8,32") from None
    print(f"decode on {arguments.model}: {arguments.steps} steps at each of the batches {arguments.batch}", flush=True)
    setting = Setting(model_name=arguments.model, gpu_model=arguments.model, progress=bar)
    settings = {} if arguments.kv_format == "auto" else {"kv_format": arguments.kv_format}
    result = batching.decode(setting, (batches, arguments.context, arguments.steps), arguments.against, **settings)
    print(f"decode on {arguments.model}, {result.provenance.dtype}, {result.provenance.device}")
    print(text_table(result.rows, DECODE_COLUMNS))
    write(arguments, result, {"device": result.provenance.device, "model": arguments.model, "rows": result.rows})
    return 0


def engine_overhead(arguments) -> int:
    """`overhead`: the engine's own time and memory."""
    result = overhead.overhead()
    print(result.provenance.device)
    print(text_table([row for row in result.rows if "step_ms" in row], OVERHEAD_COLUMNS))
    for row in result.rows:
        if "served" in row:
            print(f"after {row['served']:,} requests, Python's own memory peaked at {row['memory_kb']:,.0f} KB")
        if "simulated_chats" in row:
            print(f"virtual time: {row['row_steps_per_s']:,.0f} row-steps a second ({row['min_per_s']:,.0f} to "
                  f"{row['max_per_s']:,.0f}) over {row['simulated_chats']:,} chats, {row['row_steps']:,} row-steps")
    write(arguments, result, {"device": result.provenance.device, "rows": result.rows})
    return 0


def worked_example(arguments) -> int:
    """`simulate worked-example`: beside the articles' figures."""
    service = Service(arguments.device, arguments.model, prompts_received=not arguments.compute_prompts,
                      price_per_hour=arguments.price)
    rows = example.worked_example_rows(service, arguments.clients, arguments.requests, scale=arguments.scale)
    table = example.beside_the_articles(rows)
    print(
        f"{arguments.model} on {arguments.device}, in virtual time: 4k contexts, answers of 300 tokens, histories "
        f"{'computed' if arguments.compute_prompts else 'in the cache'}.\nA closed loop of as many clients as memory "
        "holds; the static batch of 8 has 8 clients.\nThe articles' figures are their own: an 8B model on one "
        "A100 80 GB.\n"
    )
    print(text_table(table, {name: name.replace(": ", ", ") for name in table[0]}))
    write_json(arguments.json, {"device": arguments.device, "model": arguments.model, "rows": rows, "table": table})
    return 0


# -- grade ----------------------------------------------------------------------------------------


def grade(arguments) -> int:
    """Status 0 if every check passes, 1 if one does not; a class's report is 0 whatever its marks are."""
    if (arguments.path is None) == (arguments.classroom is None):
        raise ValueError("give either PATH, for one learner's notebooks, or --class DIR")
    if (arguments.report is None) != (arguments.classroom is None):
        raise ValueError("--class DIR and --report OUT belong together")
    return _grade_path(arguments) if arguments.classroom is None else _grade_class(arguments)


def _grade_path(arguments) -> int:
    learner = classroom.find_notebooks(arguments.path)
    if not learner.notebooks:
        why = "; ".join(learner.notes) or "there is no notebook in it"
        raise ValueError(printable(f"{arguments.path} holds no exercise: {why}"))
    classroom.grade_class([learner], arguments.jobs, bar)
    print(text_table(report.rows(learner), report.COLUMNS))
    for line in report.lines(learner):
        say(line)
    print(report.score(learner))
    write_json(arguments.json, report.to_json([learner]))
    return 0 if learner.points == learner.out_of else 1


def _grade_class(arguments) -> int:
    learners = classroom.find_learners(arguments.classroom, arguments.report)
    classroom.grade_class(learners, arguments.jobs, bar, kept=arguments.report / "marks")
    for learner in learners:
        say(f"{learner.name}: {learner.points} of {learner.out_of}")
    guessed = class_guesses.of_class(arguments.classroom / learner.name for learner in learners)
    say(f"report: {report.write(learners, arguments.report, guessed)}")
    write_json(arguments.json, report.to_json(learners))
    return 0


def exercises(arguments) -> int:
    """Copy the exercises, and say where to start."""
    copies = handout.copy_exercises(arguments.folder, arguments.force)
    say(f"{len(copies)} exercises copied to {arguments.folder}")
    first = next(exercise for exercise in load_all() if exercise.weight == "essential")
    begin = next(copy for copy in copies if copy.stem == first.name)
    say(f"start with {begin}, the first of the essential ones, in JupyterLab; minillm grade {arguments.folder} marks "
        "your work")
    return 0
