"""D: fewer bits. One threshold says what a loss of quality is: NOTICEABLE, for an average as for an ability."""

from __future__ import annotations

import math
from statistics import mean

from minillm.course.verdicts.reading import (
    FACTOR,
    Reading,
    Rows,
    barely,
    column,
    find,
    judged,
    less,
    more,
    near,
    not_less,
    ratio,
    turn_by_turn,
)
from minillm.course.verdicts.words import Claim, Missing, Part, Verdict, every, true

NOTICEABLE = 1.0  # per cent of perplexity, and so about 0.01 nats a token
CLAIMED_SHARES = {"fp8": 0.5, "int8": 0.5, "int4": 0.25}


def changed(row: dict) -> Reading:
    """By how many per cent perplexity grows; its error is two standard errors over blocks of text."""
    value, error = row["change_percent"], row["change_error_percent"]
    return Reading(value, value - error, value + error, True)


def change(row: dict) -> str:
    """The same as text."""
    return f"{row['change_percent']:+.2f} % (+-{row['change_error_percent']:.2f})"


def label(rows: Rows) -> str:
    """The column that names the format: of keys and values, or of weights."""
    return "scheme" if "scheme" in rows[0] else "weights"


def named(rows: Rows, *names: str) -> dict[str, dict]:
    """The rows of these formats, as far as they are there; Missing without int8 or int4."""
    if not rows:
        raise Missing("no row")
    found = {name: row for name in names for row in rows if row.get(label(rows)) == name}
    for name in ("int8", "int4"):
        find(list(found.values()), **{label(rows): name})
    return found


def plain(rows: Rows) -> str:
    """The name of the format that the others are held against: that of the model as loaded."""
    names = [row.get(label(rows)) for row in rows]
    if found := [name for name in ("fp32", "bf16", "fp16") if name in names]:
        return found[0]
    raise Missing("no row of 32 or 16 bits")


def what(rows: Rows) -> str:
    """What is stored in fewer bits."""
    if label(rows) == "scheme":
        return "keys and values"
    once = rows[0].get("baseline", "once").startswith("once")  # older files do not say what they were
    return "weights (once 4-bit, then dequantised)" if once else "weights"


def lossless(rows: Rows) -> str:
    """What to add of a way that is there and changes no logit, but for the weights as loaded."""
    found = [row for row in rows if row.get("differing_logits") == 0 and row.get("weights") != plain(rows)]
    return "".join(f"; {row['weights']}, at {row['bits_per_weight']:.3g} bits a weight: 0 of {row['logits']:,} logits "
                   "differ" for row in found)


def d1(rows: Rows) -> Verdict:
    """Direction: fp8 and int8 take less than 16 bits, int4 less than int8. Size: 50, 50 and 25 %, within 1.25, with
    their scales."""
    shares = {name: find(rows, scheme=name)["share_of_16_bit"] for name in CLAIMED_SHARES}
    listed = ", ".join(f"{name} {share:.1%}{barely(share, CLAIMED_SHARES[name] * FACTOR)}"
                       for name, share in shares.items())
    direction = true(max(shares["fp8"], shares["int8"]) < 1 and shares["int4"] < shares["int8"])
    return judged(f"{listed} of 16 bits with their scales (claimed 50, 50 and 25 %)", direction,
                  every(*(near(shares[name], claimed) for name, claimed in CLAIMED_SHARES.items())))


def d2(rows: Rows) -> Verdict:
    """Direction: int4 costs more perplexity than int8 and fp8, beyond the errors. Size: int4 noticeable (over 1 %), the
    others not, and fp8 less than int8."""
    of = named(rows, "fp8", "int8", "int4")
    gaps = [_minus(changed(of["int4"]), changed(of[name])) for name in of if name != "int4"]
    small = [less(changed(row), NOTICEABLE) for name, row in of.items() if name != "int4"]
    order = less(_minus(changed(of["fp8"]), changed(of["int8"])), 0.0) if "fp8" in of else Part.NOT_TESTED
    listed = "; ".join(f"{name} {change(row)}" for name, row in of.items())
    measured = f"{what(rows)}: perplexity by {listed}"
    measured += {Part.ANOTHER: "; fp8 costs more than int8, not less",
                 Part.NOT_TESTED: "; fp8 is not there"}.get(order, "") + lossless(rows)
    size = every(more(changed(of["int4"]), NOTICEABLE), *small, order)
    return judged(measured, every(*(more(gap, 0.0) for gap in gaps)), size)


def _minus(a: Reading, b: Reading) -> Reading:
    """a - b, where the errors of both are independent."""
    gap, error = a.value - b.value, math.hypot(a.high - a.value, b.high - b.value)
    return Reading(gap, gap - error, gap + error, True)


def faster(before: dict, after: dict) -> Reading:
    """How many times as fast a step is, with the spread of the turns if they are recorded."""
    return turn_by_turn(after, "times_faster", ratio(before, after, "step_ms"))


def d3(rows: Rows) -> Verdict:
    """Direction: with one row each format of fewer bits is faster than the weights as loaded, and leaves room for more
    cache. Size: at the most rows measured each is still faster."""
    column(rows, "step_ms")
    loaded, most = plain(rows), max(row["rows"] for row in rows)
    gains, parts, sizes, listed = [], [], [], []
    for name in dict.fromkeys(row["weights"] for row in rows if row["weights"] != loaded):
        before, after, crowd, packed = (find(rows, weights=each, rows=number) for number in (1, most)
                                        for each in (loaded, name))
        alone, together = faster(before, after), faster(crowd, packed)
        gains.append(alone)
        parts += [more(alone), true(after["cache_tokens_in_1_gib"] > before["cache_tokens_in_1_gib"])]
        sizes.append(more(together))
        listed.append(
            f"{name} reads {after['read_mb']:,.0f} MB in place of {before['read_mb']:,.0f}: {alone} times as fast at "
            f"one row, {together} at {most}, and {after['cache_tokens_in_1_gib']:,} tokens of cache in 1 GiB beside it "
            f"({before['cache_tokens_in_1_gib']:,} before)"
        )
    return judged("; ".join(listed), every(*parts), every(*sizes), by=gains)


def d4(rows: Rows) -> Verdict:
    """Direction: in int4 rare tokens lose more than common ones, and those at 2,000 to 4,000 tokens more than those
    under 256, both beyond their errors."""
    row = named(rows, "int8", "int4")["int4"]
    found = {}
    for name, most, least in (("rare tokens", "rare_tokens", "common_tokens"),
                              ("long contexts", "at_2k_to_4k", "at_under_256")):
        column([row, row], f"{most}_change_nats")
        found[name] = _minus(*(_nats(row, f"{part}_change") for part in (most, least)))
    listed = "; ".join(f"{name} lose {gap.value:+.3f} nats more (+-{gap.high - gap.value:.3f})"
                       f"{barely(abs(gap.value), gap.high - gap.value)}" for name, gap in found.items())
    return judged(f"{what(rows)} in int4: {listed}", every(*(more(gap, 0.0) for gap in found.values())))


def _nats(row: dict, name: str) -> Reading:
    """A change of loss, with two standard errors."""
    value, error = row[f"{name}_nats"], row[f"{name}_error_nats"]
    return Reading(value, value - error, value + error, True)


def d5(rows: Rows) -> Verdict:
    """Direction: in a format whose perplexity does not grow noticeably (by 1 %), one ability loses noticeably, beyond
    its error: copying a random text, in the perplexity of the copy, or finding codes in texts of all lengths together.
    Size: a tenth of its score. Shown is the format with the largest loss."""
    cases = []
    column(rows, "change_percent")
    before = find(rows, **{label(rows): plain(rows)})
    for row in rows:
        if row is not before and row["change_percent"] < NOTICEABLE:
            cases += [(fall, part, row, text) for fall, part, text in _abilities(before, row)]
    if not cases:
        raise Missing("no format whose perplexity grows by less than 1 %")
    found = [case for case in cases if case[1] is Part.AS_CLAIMED] or cases
    fall, part, row, text = max(found, key=lambda case: case[0])
    return judged(f"{what(rows)} in {row[label(rows)]}: perplexity {change(row)}, while {text}", part,
                  true(fall >= 0.1))


def _abilities(before: dict, row: dict) -> list[tuple[float, Part, str]]:
    """For each ability the share of its score that is lost, whether it is noticeable beyond its error, and words."""
    copied, nats = row["copied_percent"], _nats(row, "copying_change")
    lost = 1 - copied / max(before["copied_percent"], 1e-9)
    growth = 100 * math.expm1(nats.value), 100 * math.expm1(nats.low), 100 * math.expm1(nats.high)
    found = [(lost, more(Reading(*growth, True), NOTICEABLE),
              f"that of a copied text grows by {growth[0]:.1f} % ({growth[1]:.1f} to {growth[2]:.1f}) and "
              f"{before['copied_percent']:.0f} to {copied:.0f} % of it are copied right")]
    lengths = [name for name in row if name.startswith("found_in_")]  # of one length there are few codes
    if lengths:
        old, new = (mean(each[name] for name in lengths) for each in (before, row))
        asked = sum(row[name.replace("found", "asked").removesuffix("_percent")] for name in lengths)
        error = 2 * 100 * math.sqrt(2 * 0.25 / asked)  # two standard errors of a difference of shares, at the most
        loss = Reading(old - new, old - new - error, old - new + error, True)
        found.append((1 - new / max(old, 1e-9), more(loss, 0.0),
                      f"finding codes falls from {old:.0f} to {new:.0f} % of {asked} (+-{error:.0f})"))
    return found


def d6(rows: Rows) -> Verdict:
    """For a default, nothing may get worse. Quality: int8 costs no noticeable perplexity (1 %), beyond its error, takes
    half of the memory, and costs less than 1 % more than fp8. Speed: int8 weights are faster at some number of rows,
    and slower at none."""
    if rows and "times_faster" in rows[0]:
        return _d6_speed(rows)
    of = named(rows, "fp8", "int8", "int4")
    int8, int4 = of["int8"], of["int4"]
    half = int8.get("share_of_16_bit") or int8["bits_per_weight"] / 16
    parts = [less(changed(int8), NOTICEABLE), more(_minus(changed(int4), changed(int8)), 0.0)]
    if "fp8" in of:
        parts.append(less(_minus(changed(int8), changed(of["fp8"])), NOTICEABLE))
    listed = "; ".join(f"{name} {change(row)}" for name, row in of.items())
    return judged(f"{what(rows)}: int8 takes {half:.1%} of 16 bits; perplexity by {listed}", every(*parts),
                  near(half, 0.5))


def _d6_speed(rows: Rows) -> Verdict:
    """int8 weights against those as loaded, at every number of rows."""
    gains = {row["rows"]: faster(find(rows, weights=plain(rows), rows=row["rows"]), row)
             for row in rows if row["weights"] == "int8"}
    if len(gains) < 2:
        raise Missing("fewer than two rows with int8 weights")
    parts = [not_less(gain) for gain in gains.values()]
    somewhere = any(gain.low > 1 for gain in gains.values())
    listed = ", ".join(f"{number}: {gain}" for number, gain in gains.items())
    return judged(f"weights: times as fast in int8, by rows: {listed}", every(*parts, true(somewhere)),
                  by=gains.values())


CLAIMS = (
    Claim("D1", "Against 16 bits, FP8 and INT8 take half of the memory and INT4 a quarter.", "50 %, 50 %, 25 %",
          ("kv_quality",), d1, ("scheme",), ("int8", "int4")),
    Claim("D2", "FP8 costs hardly any quality, INT8 little, INT4 noticeably and by the task.", "",
          ("kv_quality", "weight_quality"), d2, ("scheme", "weights"), ("int8", "int4")),
    Claim("D3", "Quantised weights help twice: fewer bytes read per token, and more room for the cache.", "",
          ("weight_speed",), d3, ("weights",), ("fp32", "int4")),
    Claim("D4", "The damage is uneven: long contexts and rare tokens suffer more.", "",
          ("kv_quality", "weight_quality"), d4),
    Claim("D5", "An aggregate score can stay while one ability goes: test your own task.", "",
          ("kv_quality", "weight_quality"), d5),
    Claim("D6", "INT8 is the default choice.", "", ("kv_quality", "weight_quality", "weight_speed"), d6,
          ("scheme", "weights"), ("int8", "int4")),
)
