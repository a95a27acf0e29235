"""The experiments of rung 5: what fewer bits save, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from minillm.course.experiments.chapters import batch_curve, measured, serve, warm_up
from minillm.course.experiments.key_errors import (
    TOKEN_BLOCK,
    PerChannelKeys,
    calibrated,
    errors,
    per_channel,
    per_token,
    queries_and_keys,
)
from minillm.course.experiments.ladder import agreement, first_divergence
from minillm.course.prompts import CHAT_PROMPTS
from minillm.course.setting import Setting
from minillm.extras.key_scaling import ChannelScaling
from minillm.fast.engine import Engine
from minillm.fast.weight_formats import WEIGHT_FORMATS, quantize_weights
from minillm.ladder.attention import KVStorage
from minillm.ladder.quantized import (
    KeyTransform,
    Rotation,
    default_transform,
    kv_bytes_per_token,
    kv_storage,
    native_format,
)
from minillm.ladder.records import Records
from minillm.ladder.request import SamplingParams
from minillm.load.source import DEFAULT
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread
from minillm.measure.quality import (
    FREQUENCY_BUCKETS,
    POSITION_BUCKETS,
    Corpus,
    HiddenCode,
    Losses,
    copy_row,
    hidden_codes,
    loss_row,
    python_help,
    repeated,
    retrieved,
    token_losses,
)
from minillm.measure.roofline import StepShape, least_work
from minillm.measure.workload import chat

REFERENCE_FORMAT, PLAIN_FORMAT = "fp32", "bf16"  # what quality, and what memory, is compared with
GIB = 1 << 30


# -- schemes: a format, and what is done to the keys before ---------------------------------------

Calibration = tuple  # queries [L, N, Hq, D] and keys [L, N, Hkv, D] of the calibration text


@dataclass(frozen=True)
class Scheme:
    """A way to store keys and values.

    served: whether the engine can be given it. main: measured in quick mode too, and not on
    text alone but with codes to find and prompts to answer.
    """

    name: str
    kv_format: str
    transform: Callable[[Setting, Calibration], KeyTransform | None]
    main: bool = True
    served: bool = True


def as_they_are(setting: Setting, calibration: Calibration) -> None:
    """Keys are stored untreated."""


def rotated(setting: Setting, calibration: Calibration) -> KeyTransform:
    """What the engine does by itself for fp8 and int4."""
    return default_transform(setting.config, "int4", setting.model.device)


def scaled_channels(setting: Setting, calibration: Calibration) -> KeyTransform:
    """Each channel's mean taken out, and its spread divided out."""
    return ChannelScaling.calibrate(calibration[1])


def balanced(setting: Setting, calibration: Calibration) -> KeyTransform:
    """Channels weighed by what queries make of them, then rotated."""
    return calibrated(*calibration)


SCHEMES = (
    Scheme("fp32", "fp32", as_they_are),
    Scheme("int8", "int8", as_they_are),
    Scheme("fp8", "fp8", rotated),
    Scheme("int4", "int4", rotated),
    Scheme("int4, calibrated", "int4", balanced),
    Scheme("int4, keys as they are", "int4", as_they_are),
    Scheme("int4, keys per channel", "int4", as_they_are, main=False, served=False),
    Scheme("int4, channels scaled", "int4", scaled_channels, main=False),
    Scheme("fp8, keys as they are", "fp8", as_they_are, main=False),
    Scheme("bf16", "bf16", as_they_are, main=False),
)


# -- what is printed ------------------------------------------------------------------------------

_BUCKETS = {
    **{f"{name}_tokens": f"{name} tokens" for name in FREQUENCY_BUCKETS},
    **{f"at_{name}": f"at {name.replace('_', ' ')}" for name in POSITION_BUCKETS},
}
# tokens of the texts that hide codes, by size of the run
LENGTHS = {"quick": (256, 768), "full": (512, 1024, 2048), "gpu": (512, 1024, 2048, 4096)}
_TEXT = {
    "perplexity": "perplexity", "perplexity_error": "+-", "change_percent": "change %", "change_error_percent": "+-",
    "same_first_choice_percent": "same first choice %", "greedy_agree_percent": "greedy agrees %",
    "answers_that_differ": "differ", "answers": "of", "first_difference_at_token": "first at token",
}
_LOSS = {
    column: title for key, name in _BUCKETS.items()
    for column, title in ((f"{key}_change_nats", name), (f"{key}_change_error_nats", "+-"))
}
_FOUND = {f"found_in_{n}_percent": f"found in {n:,} %" for n in sorted({*LENGTHS["quick"], *LENGTHS["gpu"]})}


def quality_tables(key: str, **first: str) -> tuple[dict[str, str], ...]:
    """Text, buckets and abilities, each row named by the column `key`; `first` stands in the first table only."""
    return (
        {key: key, **first, **_TEXT},
        {key: "loss grows by (nats)", **_LOSS},
        {key: "abilities", "copied_percent": "copied %", "copying_change_nats": "loss grows by (nats)",
         "copying_change_error_nats": "+-", **_FOUND},
    )


KV_TABLES = quality_tables("scheme", kv_bytes_per_token="bytes per token", share_of_16_bit="of 16 bit")
WEIGHT_TABLES = quality_tables(
    "weights", read_mb="MB read a step", bits_per_weight="bits per weight", baseline="baseline"
)


# -- the experiments ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What every format is asked to do.

    documents [R, T + 1] to predict, copies [R', T' + 1] to predict that say everything twice,
    codes to find by the length of the text that hides them, prompts to answer greedily.
    """

    corpus: Corpus
    documents: Tensor
    copies: Tensor
    codes: dict[int, list[list[HiddenCode]]]
    prompts: list[list[int]]
    max_tokens: int

    @classmethod
    def of(cls, setting: Setting) -> Task:
        tokenizer, corpus = setting.tokenizer, python_help(setting.tokenizer)
        documents = corpus.documents(*setting.size((1, 1024), (3, 4096), (12, 4096)))
        copies = repeated(setting.config.vocab_size, *setting.size((1, 256), (4, 256), (16, 256)), seed=setting.seed)
        lengths, texts, hidden = setting.size((LENGTHS["quick"], 1, 4), (LENGTHS["full"], 2, 4), (LENGTHS["gpu"], 8, 4))
        codes = {
            length: [hidden_codes(tokenizer, corpus, length, hidden, seed) for seed in range(texts)]
            for length in lengths
        }
        number, max_tokens = setting.size((4, 24), (8, 32), (24, 64))
        prompts = [tokenizer.chat(prompt) for prompt in CHAT_PROMPTS[:number]]
        return cls(corpus, documents, copies, codes, prompts, max_tokens)


@dataclass(frozen=True)
class Answers:
    """What one format did with the task. found: by length, whether each code was named."""

    losses: Losses
    copying: Losses
    found: dict[int, list[bool]] | None = None
    greedy: list[list[int]] | None = None


def answers(setting: Setting, model, task: Task, storage_for, **engine_settings) -> Answers:
    """Run one format through the whole task."""
    losses, copying = (token_losses(model, texts, storage_for) for texts in (task.documents, task.copies))
    room = max(task.codes) + 512  # for the question around the text
    make = partial(Engine, model, max_context=room, max_step_tokens=512, **engine_settings)
    found = {
        length: [right for questions in texts for right in retrieved(make(), setting.tokenizer, questions)]
        for length, texts in task.codes.items()
    }
    greedy = make().generate(task.prompts, SamplingParams(max_tokens=task.max_tokens))
    return Answers(losses, copying, found, [answer.token_ids for answer in greedy])


def answer_row(task: Task, got: Answers, reference: Answers) -> dict:
    """Quality as columns: loss and its buckets, codes found, and agreement of greedy answers."""
    row = loss_row(got.losses, reference.losses, task.documents, task.corpus.occurrences)
    row |= copy_row(got.copying, reference.copying, task.copies)
    if got.found is not None:
        for length, right in got.found.items():
            lost = sum(before and not now for before, now in zip(reference.found[length], right, strict=True))
            row |= {
                f"found_in_{length}_percent": 100 * sum(right) / len(right),
                f"asked_in_{length}": len(right), f"lost_in_{length}": lost,
            }
        row |= greedy_row(got.greedy, reference.greedy)
    return row | {"text": task.corpus.source, "text_sha256": task.corpus.sha256}


def greedy_row(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> dict:
    """How much of the reference's answers is the same, up to each one's first difference."""
    firsts = [at for got, want in zip(outputs, reference, strict=True) for at in first_divergence(got, want)]
    return {
        "greedy_agree_percent": 100 * agreement(outputs, reference),
        "answers": len(outputs),
        "answers_that_differ": len(firsts),
        "first_difference_at_token": min(firsts, default=None),
    }


def kv_quality(setting: Setting) -> Measurement:
    """Each KV format, and each way to treat the keys before: bytes, and quality against fp32."""
    model, task = setting.model, Task.of(setting)
    calibration = queries_and_keys(model, task.corpus.calibration)
    rows, reference = [], None
    for scheme in setting.each("KV formats", [s for s in SCHEMES if s.main or not setting.quick]):
        transform = scheme.transform(setting, calibration)
        storage_for = partial(make_storage, model, scheme, transform)
        if scheme.main:
            got = answers(setting, model, task, storage_for, kv_format=scheme.kv_format, key_transform=transform)
        else:
            got = Answers(*(token_losses(model, texts, storage_for) for texts in (task.documents, task.copies)))
        reference = reference or got
        rows.append({
            "scheme": scheme.name, "kv_format": scheme.kv_format, "served": scheme.served,
            **footprint(setting.config, scheme.kv_format), **answer_row(task, got, reference),
        })
    return measured("kv_quality", model, setting.model_name, rows, None, setting.seed)


def weight_quality(setting: Setting) -> Measurement:
    """Each weight format over keys and values in fp32: quality against the weights as they were loaded.

    The default checkpoint was itself stored in 4 bits once, in groups of 32, so its numbers
    are kinder to 4 bits than a model's that never was: `baseline` says so in every row.
    """
    plain, task = setting.model, Task.of(setting)
    rows, reference = [], None
    for weight_format in setting.each("weight formats", (None, *WEIGHT_FORMATS)):
        model = quantize_weights(plain, weight_format) if weight_format else plain
        storage_for = partial(kv_storage, model.config, REFERENCE_FORMAT, device=model.device)
        got = answers(setting, model, task, storage_for, kv_format=REFERENCE_FORMAT)
        reference = reference or got
        rows.append({
            "weights": weight_format or native_format(plain.dtype), "read_mb": model.weight_bytes / 1e6,
            "bits_per_weight": 8 * model.weight_bytes / read_weights(plain), "baseline": baseline(setting.model_name),
            **answer_row(task, got, reference),
        })
    return measured("weight_quality", plain, setting.model_name, rows, None, setting.seed)


def baseline(name: str) -> str:
    """What the loaded weights had been through before."""
    return "once Q4_1, dequantised" if name == DEFAULT else "as loaded"


def read_weights(model) -> int:
    """The weights that a step of a model in its own dtype reads, as a number of weights."""
    return model.weight_bytes // model.dtype.itemsize


def weight_speed(setting: Setting) -> Measurement:
    """A decode step by weight format and rows: time, share of the bandwidth, and the cache that has room beside."""
    plain, steps, prompt = setting.timed_model, setting.size(8, 16), 16
    rows, spread = [], None
    for weight_format in setting.each("weight formats", (None, *WEIGHT_FORMATS)):
        model = quantize_weights(plain, weight_format) if weight_format else plain
        curve = batch_curve(model, setting.timed_name, setting.size((1, 8), (1, 2, 4, 8, 16, 32)), prompt, steps)
        spread = spread or curve.provenance.noise
        for row in curve.rows:
            shape = StepShape.decode([prompt + steps // 2] * row["rows"])
            work = least_work(model.config, native_format(model.dtype), shape, model.weight_bytes)
            rows.append({
                "weights": weight_format or native_format(plain.dtype), "rows": row["rows"],
                "read_mb": model.weight_bytes / 1e6, "step_ms": row["step_ms"], "min_ms": row["min_ms"],
                "max_ms": row["max_ms"], "tokens_per_s": row["tokens_per_s"],
                "mbu": setting.ceilings.mbu(work, row["step_ms"] / 1e3),
                "cache_tokens_in_1_gib": cache_beside(model, GIB),
            })
    for row in rows:
        same = next(first for first in rows if first["rows"] == row["rows"])  # in the weights as loaded
        row["times_faster"] = same["step_ms"] / row["step_ms"]
    return measured("weight_speed", plain, setting.timed_name, rows, Spread(**spread, repeats=steps, warmups=1))


def cache_beside(model, memory: int) -> int:
    """Tokens of 16-bit cache that fit into `memory` bytes beside the weights, the embedding table counted."""
    left = memory - model.weight_bytes - model.embedding.nbytes
    return max(0, left) // kv_bytes_per_token(model.config, PLAIN_FORMAT)


def kv_concurrency(setting: Setting) -> Measurement:
    """The `chat` lengths, all at once, in the same bytes for keys and values: who runs at once, and how fast."""
    model = setting.timed_model
    requests, scale, fit = setting.size((16, 1 / 32, 2), (48, 1 / 8, 4), (512, 1.0, 32))
    items = chat(requests, scale=scale, seed=setting.seed)
    tokens = max(
        fit * sum(len(item.prompt_ids) + item.output_tokens for item in items) // requests,
        max(len(item.prompt_ids) + item.max_tokens for item in items) + 16,
    )
    memory = tokens * kv_bytes_per_token(model.config, REFERENCE_FORMAT)
    warm_up(model)
    rows = []
    for kv_format in setting.each("KV formats", ("fp32", "bf16", "int8", "int4")):
        records = serve(model, items, kv_format=kv_format, kv_memory=memory, max_batch=setting.size(32, 64, 512))
        rows.append(concurrency_row(model.config, kv_format, memory, records))
    for row in rows:
        plain = next((r for r in rows if r["kv_format"] == PLAIN_FORMAT), rows[0])
        row["times_16_bit_requests"] = row["mean_requests"] / plain["mean_requests"]
        row["times_16_bit_speed"] = row["tokens_per_s"] / plain["tokens_per_s"]
    speeds = Spread.of([row["tokens_per_s"] for row in rows], warmups=1)
    return measured("kv_concurrency", model, setting.timed_name, rows, speeds, setting.seed)


def concurrency_row(config, kv_format: str, memory: int, records: Records) -> dict:
    """One row of `kv_concurrency`. Requests at once are means over the steps; times are of this device."""
    summary, stored = metrics.summary(records), kv_bytes_per_token(config, kv_format)
    return {
        "kv_format": kv_format, "kv_mb": memory / 1e6, "tokens_that_fit": memory // (16 * stored) * 16,
        "mean_requests": sum(len(step.members) for step in records.steps) / len(records.steps),
        "peak_requests": summary["batch"]["peak_rows"], "steps": summary["steps"],
        "preemptions": summary["preemptions"], "tokens_per_s": summary["output_tokens"] / summary["busy_s"],
        "ttft_p50_s": summary["ttft_s"]["p50"], "itl_p50_ms": summary["itl_per_token_s"]["p50"] * 1e3,
        "itl_p99_ms": summary["itl_per_token_s"]["p99"] * 1e3,
    }


def make_storage(model, scheme: Scheme, transform: KeyTransform | None, slots: int) -> KVStorage:
    """An empty store of the scheme, with so many slots."""
    storage = kv_storage(model.config, scheme.kv_format, slots, model.device, transform)
    if not scheme.served:
        storage.keys = PerChannelKeys(storage)
    return storage


def footprint(config, kv_format: str) -> dict:
    """Bytes of cache per token, scales counted, and their share of 16 bits."""
    stored = kv_bytes_per_token(config, kv_format)
    return {"kv_bytes_per_token": stored, "share_of_16_bit": stored / kv_bytes_per_token(config, PLAIN_FORMAT)}


def key_errors(setting: Setting) -> Measurement:
    """int4 on the model's own keys: what each way to store them does to channels, scores and attention weights."""
    corpus, model = python_help(setting.tokenizer), setting.model
    calibration = queries_and_keys(model, corpus.calibration)
    text = corpus.documents(1, setting.size(256, 1024))[0, :-1]
    queries, keys = queries_and_keys(model, text)
    head_dim = keys.shape[-1]
    ways = {
        "as they are": (per_token, None),
        "rotated (Hadamard)": (per_token, Rotation(head_dim, model.device)),
        "rotated (seeded)": (per_token, Rotation(head_dim, model.device, seed=1)),
        "channels scaled, mean out": (per_token, ChannelScaling.calibrate(calibration[1])),
        "calibrated, then rotated": (per_token, calibrated(*calibration)),
        f"per channel, over {TOKEN_BLOCK} tokens": (per_channel, None),
    }
    rows = [
        {"keys": name, **errors(queries, keys, store, transform)}
        for name, (store, transform) in setting.each("keys", list(ways.items()))
    ]
    return measured("key_errors", model, setting.model_name, rows, None, setting.seed)
