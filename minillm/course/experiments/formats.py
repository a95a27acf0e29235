"""The experiments of letter D: what fewer bits save, and what they cost.

Keys are hard to quantise because a few channels are far larger than the rest. One norm over the whole tensor hides
what that does, so `key_errors` takes four figures: the error of a channel against that channel's own size, the error
of the scores before the softmax, how far the attention weights move (total variation: half the sum of the
differences, 0 to 1), and that norm for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from minillm.course.experiments.common import decode_seconds, measured, serve, spread_columns, step_row, warm_up
from minillm.course.experiments.quality import QualityTask, python_help, quality_row, quality_tables, run_task
from minillm.course.experiments.repeats import in_turns
from minillm.course.experiments.rounding import FP8_WEIGHTS, OTHER_GROUPS, OWN_GROUPS, NotExact, rounded
from minillm.course.setting import Setting, timed
from minillm.extras.key_scaling import ChannelScaling, KeyTransform
from minillm.fast.memory import native_format
from minillm.fast.weight_formats import WEIGHT_FORMATS, quantize_weights
from minillm.ladder.attention import KVStorage
from minillm.ladder.decode import NoCache
from minillm.ladder.quantized import (
    INT4_GROUP,
    NativeStore,
    Rotation,
    even_group,
    int4_decode,
    int4_encode,
    kv_bytes_per_token,
    kv_storage,
)
from minillm.ladder.records import Records
from minillm.load.source import DEFAULT
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread
from minillm.measure.roofline import StepShape, StepWork
from minillm.measure.workload import chat
from minillm.model.llama import Llama

REFERENCE_FORMAT, PLAIN_FORMAT = "fp32", "bf16"  # what quality, and what memory, is compared with
TOKEN_BLOCK = 32  # tokens that share a scale where keys are stored per channel
KV_TABLES = quality_tables("scheme", kv_bytes_per_token="bytes per token", share_of_16_bit="of 16 bit")
WEIGHT_TABLES = quality_tables(
    "weights", read_mb="MB read a step", bits_per_weight="bits per weight", differing_logits="logits that differ",
    logits="of", baseline="baseline"
)
TURNS = 3  # of each set-up that is timed
LOGIT_TOKENS = 256  # of the text whose logits are compared one by one


# -- ways to store keys ---------------------------------------------------------------------------


class RecordedAttention(NoCache):
    """Attention without a cache that keeps every layer's queries and keys."""

    def __init__(self) -> None:
        self.queries, self.keys = [], []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D]."""
        self.queries.append(q)
        self.keys.append(k)
        return super().attend(layer, q, k, v)


@torch.inference_mode()
def queries_and_keys(model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Every layer's queries [L, N, Hq, D] and keys [L, N, Hkv, D] of a text ids [N]."""
    recorded, ids = RecordedAttention(), ids.to(model.device)
    model.hidden_states(ids, torch.arange(len(ids), device=model.device), recorded)
    return torch.stack(recorded.queries), torch.stack(recorded.keys)


class Chain:
    """Several transforms, one after the other."""

    def __init__(self, *transforms: KeyTransform) -> None:
        self.transforms = transforms

    def apply(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, Hq, D], k [N, Hkv, D] -> the same, transformed."""
        for transform in self.transforms:
            q, k = transform.apply(layer, q, k)
        return q, k


def calibrated(queries: Tensor, keys: Tensor) -> Chain:
    """The best served way for int4: mean out and channels balanced, as calibrated on these, then rotated."""
    return Chain(ChannelScaling.calibrate(keys, queries), Rotation(keys.shape[-1], keys.device))


def key_transforms(queries: Tensor, keys: Tensor) -> dict[str, KeyTransform | None]:
    """By name, calibrated on the queries [L, N, Hq, D] and keys [L, N, Hkv, D] of a text that is not measured."""
    return {
        "as they are": None,
        "rotated (Hadamard)": Rotation(keys.shape[-1], keys.device),  # the engine's default for fp8 and int4
        "rotated (seeded)": Rotation(keys.shape[-1], keys.device, seed=1),
        "channels scaled, mean out": ChannelScaling.calibrate(keys),
        "calibrated, then rotated": calibrated(queries, keys),
    }


def per_token(keys: Tensor) -> Tensor:
    """keys [N, Hkv, D], quantised to int4 as the engine does and back."""
    return int4_decode(*int4_encode(keys, even_group("head_dim", keys.shape[-1], INT4_GROUP)))


def per_channel(keys: Tensor) -> Tensor:
    """keys [N, Hkv, D], quantised to int4 over blocks of tokens and back; ValueError for a block that is not full."""
    if len(keys) % TOKEN_BLOCK:
        raise ValueError(f"{len(keys)} tokens are not a whole number of blocks of {TOKEN_BLOCK}")
    return int4_decode(*int4_encode(keys.permute(1, 2, 0), TOKEN_BLOCK)).permute(2, 0, 1)


class PerChannelKeys(NativeStore):
    """Keys rounded to int4 over TOKEN_BLOCK neighbouring tokens of one channel, and kept as the numbers they became.

    An experiment, not a format that can be served: a group's scale is known once its last
    token is there, and a token that is rolled back or shared would change its neighbours.
    """

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        """x [N, Hkv, D]; N must be a multiple of TOKEN_BLOCK."""
        super().write(layer, slots, per_channel(x))


# -- keys and values in fewer bits ----------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """A way to store keys and values: a format, and which of `key_transforms` the keys go through before.

    main: measured in quick mode too, and not on losses alone but with codes to find and prompts to answer. much: on
    all documents, where the others have some of the long ones (`QualityTask.asking`).
    served: whether the engine can be given it; if not, keys are stored per channel.
    """

    name: str
    kv_format: str
    keys: str = "as they are"
    main: bool = True
    served: bool = True
    much: bool = False

    def storage(self, model, transform: KeyTransform | None, slots: int) -> KVStorage:
        """An empty store with `slots` slots."""
        storage = kv_storage(model.config, self.kv_format, slots, model.device, transform)
        if not self.served:
            storage.keys = PerChannelKeys(model.config, slots, model.device, torch.float32)
        return storage


SCHEMES = (
    Scheme("fp32", "fp32", much=True),
    Scheme("int8", "int8"),
    Scheme("fp8", "fp8", "rotated (Hadamard)"),
    Scheme("int4", "int4", "rotated (Hadamard)", much=True),
    Scheme("int4, calibrated", "int4", "calibrated, then rotated"),
    Scheme("int4, keys as they are", "int4"),
    Scheme("int4, keys per channel", "int4", main=False, served=False),
    Scheme("int4, channels scaled", "int4", "channels scaled, mean out", main=False),
    Scheme("fp8, keys as they are", "fp8", main=False),
    Scheme("bf16", "bf16", main=False),
)


def kv_quality(setting: Setting) -> Measurement:
    """Each KV format, and each way to treat the keys before: bytes, and quality against fp32."""
    model, task = setting.model, QualityTask.of(setting)
    calibration = queries_and_keys(model, task.corpus.calibration)
    schemes = setting.each("KV formats", [scheme for scheme in SCHEMES if scheme.main or not setting.quick])
    rows = list(scheme_rows(model, setting.tokenizer, task, calibration, schemes))
    return measured("kv_quality", model, setting.model_name, rows, None, setting.seed)


def scheme_rows(
    model, tokenizer, task: QualityTask, calibration: tuple[Tensor, Tensor], schemes: Iterable[Scheme]
) -> Iterator[dict]:
    """The rows of `kv_quality`, each against the first; calibration: what `key_transforms` takes."""
    transforms, reference = key_transforms(*calibration), None
    for scheme in schemes:
        transform, stored = transforms[scheme.keys], kv_bytes_per_token(model.config, scheme.kv_format)
        asked = task.asking(scheme.much, scheme.main)
        got = run_task(
            model, tokenizer, asked, partial(scheme.storage, model, transform), kv_format=scheme.kv_format,
            key_transform=transform,
        )
        reference = reference or got
        yield {
            "scheme": scheme.name, "kv_format": scheme.kv_format, "served": scheme.served, "kv_bytes_per_token": stored,
            "share_of_16_bit": stored / kv_bytes_per_token(model.config, PLAIN_FORMAT),
            **quality_row(asked, got, reference),
        }


@timed
def kv_concurrency(setting: Setting) -> Measurement:
    """The `chat` lengths, arriving together, in the same bytes for keys and values: concurrent requests and speed."""
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
        fitting = memory // (16 * kv_bytes_per_token(model.config, kv_format)) * 16
        rows.append({"kv_format": kv_format, "kv_mb": memory / 1e6, "tokens_that_fit": fitting,
                     **concurrency_columns(records)})
    plain = next((row for row in rows if row["kv_format"] == PLAIN_FORMAT), rows[0])
    for row in rows:
        row["times_16_bit_requests"] = row["mean_requests"] / plain["mean_requests"]
        row["times_16_bit_speed"] = row["tokens_per_s"] / plain["tokens_per_s"]
    speeds = Spread.of([row["tokens_per_s"] for row in rows], warmups=1)
    return measured("kv_concurrency", model, setting.timed_name, rows, speeds, setting.seed)


def concurrency_columns(records: Records) -> dict:
    """Concurrent requests, as means over the steps, and times of this device."""
    summary = metrics.summary(records)
    return {
        "mean_requests": summary["batch"]["mean_rows"], "peak_requests": summary["batch"]["peak_rows"],
        "steps": summary["steps"], "preemptions": summary["preemptions"],
        "tokens_per_s": summary["output_tokens"] / summary["busy_s"], "ttft_p50_s": summary["ttft_s"]["p50"],
        "itl_p50_ms": summary["itl_per_token_s"]["p50"] * 1e3, "itl_p99_ms": summary["itl_per_token_s"]["p99"] * 1e3,
    }


# -- weights in fewer bits ------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightScheme:
    """A way to store weights. make: from the model as loaded to one that has them so, and the bytes that a step reads
    of them. main, much: as of a `Scheme`."""

    name: str
    make: Callable[[Llama], tuple[Llama, float]]
    main: bool = True
    much: bool = False


def served_weights(plain: Llama) -> list[WeightScheme]:
    """As they were loaded, then each weight format that can be served."""

    def quantized(name: str, model: Llama) -> tuple[Llama, float]:
        small = quantize_weights(model, name)
        return small, small.weight_bytes

    loaded = WeightScheme(native_format(plain.dtype), lambda model: (model, model.weight_bytes), much=True)
    return [loaded, *(WeightScheme(name, partial(quantized, name), much=name == "int4") for name in WEIGHT_FORMATS)]


def weight_schemes(setting: Setting, plain: Llama) -> list[WeightScheme]:
    """The same, then ways that are only measured (`rounding.py`); last the one in which the checkpoint was once stored
    and which loses nothing, if there is such a one."""
    others = [FP8_WEIGHTS, *(() if setting.quick else OTHER_GROUPS), OWN_GROUPS]
    return [*served_weights(plain), *(WeightScheme(way.name, partial(rounded, rounding=way), main=way is FP8_WEIGHTS)
                                      for way in others)]


def weight_quality(setting: Setting) -> Measurement:
    """Ways to store weights over keys and values in fp32: quality against the weights as they were loaded.

    int8 and int4 are the formats that can be served: a scale per output channel, and a scale and a middle per 64
    inputs. The default checkpoint was itself stored in 4 bits once, in groups of 32 inputs, so its numbers are kinder
    to those very groups, where nothing is lost, and perhaps to others, than a model's that never was: `baseline` says
    so in every row.
    """
    plain, task, rows, reference = setting.model, QualityTask.of(setting), [], None
    baseline = "once Q4_1, dequantised" if setting.model_name == DEFAULT else "as loaded"
    probe = task.documents[0, :LOGIT_TOKENS]
    wanted = all_logits(plain, probe)
    for scheme in setting.each("weight formats", weight_schemes(setting, plain)):
        try:
            model, stored = scheme.make(plain)
        except NotExact:  # the checkpoint was never stored so
            continue
        asked = task.asking(scheme.much, scheme.main)
        storage_for = partial(kv_storage, model.config, REFERENCE_FORMAT, device=model.device)
        got = run_task(model, setting.tokenizer, asked, storage_for, kv_format=REFERENCE_FORMAT)
        reference = reference or got
        rows.append({
            "weights": scheme.name, "read_mb": stored / 1e6,
            "bits_per_weight": 8 * stored / (plain.weight_bytes // plain.dtype.itemsize),
            "differing_logits": int((all_logits(model, probe) != wanted).sum()), "logits": wanted.numel(),
            "baseline": baseline, **quality_row(asked, got, reference),
        })
    return measured("weight_quality", plain, setting.model_name, rows, None, setting.seed)


@torch.inference_mode()
def all_logits(model, ids: Tensor) -> Tensor:
    """The logits [N, V] after each token of ids [N], which is one prompt."""
    ids = ids.to(model.device)
    return model.forward(ids, torch.arange(len(ids), device=model.device), NoCache())


@timed
def weight_speed(setting: Setting) -> Measurement:
    """A decode step by weight format and rows: time, share of the bandwidth, and the cache that has room beside.

    At each number of rows the formats take turns. cache_tokens_in_1_gib: tokens of 16-bit cache that fit beside the
    weights, the embedding table counted.
    """
    plain, steps, prompt = setting.timed_model, setting.size(6, 12), 16
    models = {scheme.name: scheme.make(plain)[0] for scheme in served_weights(plain)}
    rows, spread = [], None
    for number in setting.each("weight_speed", setting.size((1, 8), (1, 2, 4, 8, 16, 32))):
        runs = in_turns({name: partial(decode_seconds, model, number, prompt, steps)
                         for name, model in models.items()}, TURNS)
        before = next(iter(runs.values()))
        spread = spread or before[0]
        for name, model in models.items():
            work = setting.work(StepShape.decode([prompt + steps // 2] * number), model)
            rows.append({"weights": name, "rows": number, "read_mb": model.weight_bytes / 1e6,
                         **turns_row(setting, work, runs[name], number, [run.median for run in before]),
                         "cache_tokens_in_1_gib": tokens_beside(model)})
    rows.sort(key=lambda row: list(models).index(row["weights"]))
    return measured("weight_speed", plain, setting.timed_name, rows, spread)


def turns_row(
    setting: Setting, work: StepWork, runs: Sequence[Spread], number: int, before: Sequence[float]
) -> dict:
    """`step_row` over the steps of all turns, with the spread of the turns' medians. before: the seconds of the same
    turns with the weights as loaded."""
    readings, medians = [each for run in runs for each in run.readings], [run.median for run in runs]
    row = step_row(setting, work, Spread.of(readings, runs[0].warmups), number)
    return {
        **row, **spread_columns("step_ms", [each * 1e3 for each in medians]), "tokens_per_s": number / median(medians),
        **spread_columns("times_faster", [old / new for old, new in zip(before, medians, strict=True)]),
        "turns": len(runs),
    }


def tokens_beside(model: Llama) -> int:
    """Tokens of 16-bit cache in what weights and embedding table leave of 1 GiB."""
    left = (1 << 30) - model.weight_bytes - model.embedding.nbytes
    return max(0, left) // kv_bytes_per_token(model.config, PLAIN_FORMAT)


# -- the errors of keys in int4 -------------------------------------------------------------------


def key_errors(setting: Setting) -> Measurement:
    """int4 on the model's own keys: what each way to store them does to channels, scores and attention weights."""
    corpus, model = python_help(setting.tokenizer), setting.model
    ways = {name: (per_token, transform) for name, transform in
            key_transforms(*queries_and_keys(model, corpus.calibration)).items()}
    ways[f"per channel, over {TOKEN_BLOCK} tokens"] = per_channel, None
    measured_text = queries_and_keys(model, corpus.documents(1, setting.size(256, 1024))[0, :-1])
    rows = [{"keys": name, **errors(*measured_text, *way)} for name, way in setting.each("keys", list(ways.items()))]
    return measured("key_errors", model, setting.model_name, rows, None, setting.seed)


def errors(
    queries: Tensor, keys: Tensor, store: Callable[[Tensor], Tensor], transform: KeyTransform | None = None
) -> dict:
    """The figures of one way to store keys, over all layers: queries [L, N, Hq, D], keys [L, N, Hkv, D].

    store(keys [N, Hkv, D]) gives them as read back. Errors of keys are taken in the
    transformed channels, and relative; those of scores and weights do not depend on it.
    """
    rows = []
    for layer, (q, k) in enumerate(zip(queries.float(), keys.float(), strict=True)):
        stored_q, stored_k = transform.apply(layer, q, k) if transform else (q, k)
        read = store(stored_k)
        rows.append({**_channel_errors(stored_k, read), **_score_errors(scores(q, k), scores(stored_q, read))})
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q [N, Hq, D], k [N, Hkv, D] -> scaled scores [Hq, N, N], -inf for tokens to come."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    products = torch.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
    return products.masked_fill_(~torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril(), -torch.inf)


def _channel_errors(k: Tensor, read: Tensor) -> dict:
    """One layer's keys [N, Hkv, D] against what is read back, each channel against its own size."""
    wrong = (read - k).square().sum(0)  # [Hkv, D]
    channels = (wrong / (k - k.mean(0)).square().sum(0).clamp_min(1e-12)).sqrt()
    return {
        "whole_tensor_error": float((wrong.sum() / k.square().sum()).sqrt()),
        "median_channel_error": median(channels.flatten().tolist()), "worst_channel_error": float(channels.max()),
    }


def _score_errors(before: Tensor, after: Tensor) -> dict:
    """One layer's scores [Hq, N, N], compared up to a constant per query, which a softmax does not see."""
    seen = before.isfinite()
    moved = torch.where(seen, after - before, 0.0)  # [Hq, N, N]
    centred = torch.where(seen, moved - moved.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True), 0.0)
    variation = (after.softmax(-1) - before.softmax(-1)).abs().sum(-1) / 2  # [Hq, N]
    return {"score_error": float((centred.square().sum() / seen.sum()).sqrt()),
            "attention_variation": float(variation.mean())}
