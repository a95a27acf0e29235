"""What a format costs in quality: real text, copies, hidden codes and greedy answers, each against a reference.

The text is the reference help that every Python carries (`pydoc_data.topics`). It runs through the engine's own
attention, so every key and value that a token sees was stored in the format and read back. Losses are compared token
by token with the reference's on the same text: the difference has a far smaller error than either loss.

An error bar is two standard errors of the mean over blocks of neighbouring tokens, whose losses are not independent.
"""

from __future__ import annotations

import hashlib
import math
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.course.experiments.ladder import agreement, first_divergence
from minillm.course.prompts import CHAT_PROMPTS
from minillm.course.setting import Setting
from minillm.fast.attention import FastAttention
from minillm.fast.engine import Engine
from minillm.ladder.attention import RowSpan
from minillm.ladder.quantized import KVStorage
from minillm.ladder.request import SamplingParams

# The end of the text, which is never measured. As long as the longest measured context: low-frequency rotary channels
# never complete a turn in it, so their mean depends on the text's length.
CALIBRATION_TOKENS = 4096
ERROR_BLOCK = 64  # neighbouring tokens that count as one observation
# parts of a text by how often its tokens occur (more than, up to), and by where they stand (from, before)
FREQUENCIES = {"rare_tokens": (0, 10), "medium_tokens": (10, 200), "common_tokens": (200, math.inf)}
POSITIONS = {"at_under_256": (0, 256), "at_256_to_1k": (256, 1024), "at_1k_to_2k": (1024, 2048),
             "at_2k_to_4k": (2048, 4096)}
FEWER = 3  # of so many long documents, a format from which less is asked has one; of twice as many without abilities
LENGTHS = (256, 768), (512, 1024, 2048), (512, 1024, 2048, 4096)  # of texts that hide codes: quick, full, on a GPU


@dataclass(frozen=True)
class Corpus:
    """A text as tokens [M], what it is, and how often each token of the vocabulary occurs in it [V]."""

    ids: Tensor
    occurrences: Tensor
    source: str
    sha256: str

    def documents(self, number: int, tokens: int, begin: float = 0.0, end: float = 1.0) -> Tensor:
        """`number` pieces [number, tokens + 1], evenly spaced and clear of the calibration text.

        begin, end: the part of the text that they are taken from, as shares. Raises ValueError if they would overlap.
        """
        first, last = (round(share * (len(self.ids) - CALIBRATION_TOKENS)) for share in (begin, end))
        usable = last - first
        if number * (tokens + 1) > usable:
            raise ValueError(f"{number} pieces of {tokens:,} tokens and one do not fit into the text's {usable:,}")
        return torch.stack([self.ids[first + i * usable // number :][: tokens + 1] for i in range(number)])

    @property
    def calibration(self) -> Tensor:
        """The tokens [CALIBRATION_TOKENS] that scales are taken from."""
        return self.ids[-CALIBRATION_TOKENS:]


def python_help(tokenizer) -> Corpus:
    """Python's own language reference in English: about 110,000 tokens. It differs between Python versions."""
    from pydoc_data.topics import topics  # half a megabyte that only this experiment reads

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = torch.tensor(tokenizer.encode(text))
    source = f"pydoc_data.topics of Python {platform.python_version()}"
    return Corpus(ids, torch.bincount(ids), source, hashlib.sha256(text.encode()).hexdigest())


# -- one task for every format --------------------------------------------------------------------


@dataclass(frozen=True)
class QualityTask:
    """What every format is given: documents [R, T + 1] and copies [R', 2 T' + 1] to predict, codes to find by the
    length of the text that hides them, prompts to answer greedily with `max_tokens` each, and short documents
    [R'', t + 1], which hold most of the tokens at early positions; None: there are none."""

    corpus: Corpus
    documents: Tensor
    copies: Tensor
    codes: dict[int, list[list[HiddenCode]]] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    max_tokens: int = 0
    short: Tensor | None = None
    every: int = 1  # of so many documents of the whole task, this one has one

    @classmethod
    def of(cls, setting: Setting) -> QualityTask:
        """The whole task at the sizes of a setting."""
        tokenizer, corpus = setting.tokenizer, python_help(setting.tokenizer)
        documents = corpus.documents(*setting.size((1, 1024), (6, 4096), (12, 4096)), end=0.5)
        short = None if setting.quick else corpus.documents(64, 256, begin=0.5)
        copies = repeated(setting.config.vocab_size, *setting.size((1, 256), (4, 256), (16, 256)), seed=setting.seed)
        texts = range(setting.size(1, 2, 8))
        codes = {length: [hidden_codes(tokenizer, corpus, length, len(DOORS), seed) for seed in texts]
                 for length in setting.size(*LENGTHS)}
        number, max_tokens = setting.size((4, 24), (8, 32), (24, 64))
        prompts = [tokenizer.chat(prompt) for prompt in CHAT_PROMPTS[:number]]
        return cls(corpus, documents, copies, codes, prompts, max_tokens, short)

    def asking(self, much: bool, abilities: bool) -> QualityTask:
        """As it is, or without short documents and with one in FEWER of the long ones; with codes and prompts, or
        without them, and then with half of those documents."""
        task = self if abilities else replace(self, codes={}, prompts=[])
        every = 1 if much else FEWER if abilities else 2 * FEWER
        return task if much else replace(task, documents=self.documents[::every], short=None, every=every)


@dataclass(frozen=True)
class QualityResult:
    """What one format did with the task. found: by length, whether each code was named; greedy: the answers' tokens;
    short: the losses of the short documents, if there are any."""

    losses: Losses
    copying: Losses
    found: dict[int, list[bool]]
    greedy: list[list[int]]
    short: Losses | None = None


def run_task(model, tokenizer, task: QualityTask, storage_for, **engine_settings) -> QualityResult:
    """One format's result; `storage_for` as in `token_losses`, `engine_settings` for codes and prompts."""
    losses, copying = (token_losses(model, texts, storage_for) for texts in (task.documents, task.copies))
    short = None if task.short is None else token_losses(model, task.short, storage_for)
    longest = max(task.codes, default=0) + 512  # with the question around the text
    make = partial(Engine, model, max_context=longest, max_step_tokens=512, **engine_settings)
    found = {length: [right for questions in texts for right in retrieved(make(), tokenizer, questions)]
             for length, texts in task.codes.items()}
    greedy = make().generate(task.prompts, SamplingParams(max_tokens=task.max_tokens)) if task.prompts else []
    return QualityResult(losses, copying, found, [answer.token_ids for answer in greedy], short)


def quality_row(task: QualityTask, got: QualityResult, reference: QualityResult) -> dict:
    """Quality as columns: the loss and its parts, codes found, agreement of greedy answers, and which text it was.

    reference: of the whole task, of which this one may be a part (`QualityTask.asking`).
    """
    return {
        **text_columns(task, got, reference),
        **copy_columns(got.copying, reference.copying, task.copies),
        **found_columns(got.found, reference.found), **greedy_columns(got.greedy, reference.greedy),
        "text": task.corpus.source, "text_sha256": task.corpus.sha256,
    }


def text_columns(task: QualityTask, got: QualityResult, reference: QualityResult) -> dict:
    """`loss_columns` over all documents of a task, long and short."""
    texts = [(got.losses, Losses(*(part[:: task.every] for part in reference.losses)), task.documents)]
    if task.short is None:
        return loss_columns(*texts[0], task.corpus.occurrences)
    texts.append((got.short, reference.short, task.short))
    nats = [[in_blocks(losses[which].nats) for losses in texts] for which in range(2)]
    choices = [[in_blocks(losses[which].first_choice) for losses in texts] for which in range(2)]
    losses, before = (Losses(torch.cat(nats[which]), torch.cat(choices[which])) for which in range(2))
    targets = [documents[:, 1:] for *_, documents in texts]
    places = [torch.arange(tokens.shape[1]).expand_as(tokens) for tokens in targets]
    joined = (torch.cat([in_blocks(part) for part in parts]) for parts in (targets, places))
    return token_columns(losses, before, *joined, task.corpus.occurrences)


def in_blocks(values: Tensor) -> Tensor:
    """values [R, T] -> [R * T / ERROR_BLOCK, ERROR_BLOCK], so that texts of several lengths can be joined."""
    return values.unflatten(1, (-1, ERROR_BLOCK)).flatten(0, 1)


def quality_tables(key: str, **first: str) -> tuple[dict[str, str], ...]:
    """Three tables of the columns of `quality_row`, rows named by the column `key`; `first` is in the first alone."""
    changes: dict[str, str] = {}
    for part in (*FREQUENCIES, *POSITIONS):
        changes |= {f"{part}_change_nats": part.replace("_", " "), f"{part}_change_error_nats": "+-"}
    found = {f"found_in_{n}_percent": f"found in {n:,} %" for n in sorted({*LENGTHS[0], *LENGTHS[2]})}
    return (
        {key: key, **first, "perplexity": "perplexity", "perplexity_error": "+-", "change_percent": "change %",
         "change_error_percent": "+-", "same_first_choice_percent": "same first choice %",
         "greedy_agree_percent": "greedy agrees %", "answers_that_differ": "differ", "answers": "of",
         "first_difference_at_token": "first at token"},
        {key: "loss grows by (nats)", **changes},
        {key: "abilities", "copied_percent": "copied %", "copying_change_nats": "loss grows by (nats)",
         "copying_change_error_nats": "+-", **found},
    )


# -- the loss of each token -----------------------------------------------------------------------


class Losses(NamedTuple):
    """Of each predicted token: its loss in nats [R, T], and the model's first choice [R, T]."""

    nats: Tensor
    first_choice: Tensor


@torch.inference_mode()
def token_losses(model, documents: Tensor, storage_for: Callable[[int], KVStorage], chunk: int = 256) -> Losses:
    """Teacher forcing over documents [R, T + 1], `chunk` tokens a step, through a store made by `storage_for(slots)`.

    A step's own keys are read from the store too, so the chunk decides the speed alone.
    """
    rows = []
    for document in documents.to(model.device):
        storage, chunks = storage_for(len(document)), []
        for start in range(0, len(document) - 1, chunk):
            tokens = document[start : start + chunk + 1]  # [N + 1]: the last is only predicted
            span = RowSpan(start, len(tokens) - 1, [0])  # one block that is as long as the text
            cache = FastAttention(storage, [span], len(document), 0)
            logits = model.forward(tokens[:-1], cache.positions.to(model.device), cache).float()  # [N, V]
            chunks.append((F.cross_entropy(logits, tokens[1:], reduction="none").cpu(), logits.argmax(-1).cpu()))
        rows.append(map(torch.cat, zip(*chunks, strict=True)))
    return Losses(*map(torch.stack, zip(*rows, strict=True)))


def with_error(values: Tensor, chosen: Tensor | None = None) -> tuple[float, float]:
    """The mean of the chosen values [R, T] (all if None), and two standard errors of it over blocks of neighbours.

    The error is infinite where all of them lie in one block, from which no error can be estimated.
    """
    chosen = torch.ones_like(values, dtype=torch.bool) if chosen is None else chosen
    mean = values[chosen].mean()
    blocks = _sums_of_blocks(torch.where(chosen, values - mean, 0.0))
    filled = int((_sums_of_blocks(chosen.float()) > 0).sum())
    if filled < 2:
        return float(mean), math.inf
    variance = blocks.square().sum() * filled / (filled - 1)
    return float(mean), 2 * float(variance.sqrt() / chosen.sum())


def _sums_of_blocks(values: Tensor) -> Tensor:
    """values [R, T] -> their sums over ERROR_BLOCK neighbours [R, blocks]; the last block may be short."""
    return F.pad(values, (0, -values.shape[1] % ERROR_BLOCK)).unflatten(1, (-1, ERROR_BLOCK)).sum(-1)


def loss_columns(losses: Losses, reference: Losses, documents: Tensor, occurrences: Tensor) -> dict:
    """Perplexity, its change against the reference's, and the loss by token frequency and by position."""
    targets = documents[:, 1:]
    return token_columns(losses, reference, targets, torch.arange(targets.shape[1]).expand_as(targets), occurrences)


def token_columns(
    losses: Losses, reference: Losses, targets: Tensor, positions: Tensor, occurrences: Tensor
) -> dict:
    """The same of tokens [R, T], of each row neighbours, at these positions [R, T]."""
    count = occurrences[targets]
    mean, error = with_error(losses.nats)
    change, change_error = with_error(losses.nats - reference.nats)
    row = {
        "tokens": targets.numel(),
        "perplexity": math.exp(mean), "perplexity_error": math.exp(mean) * error,
        "change_percent": 100 * math.expm1(change), "change_error_percent": 100 * math.exp(change) * change_error,
        "same_first_choice_percent": 100 * float((losses.first_choice == reference.first_choice).float().mean()),
    }
    for name, (low, high) in FREQUENCIES.items():
        row |= part_columns(name, losses, reference, (count > low) & (count <= high))
    for name, (low, high) in POSITIONS.items():
        row |= part_columns(name, losses, reference, (positions >= low) & (positions < high))
    return row


def part_columns(name: str, losses: Losses, reference: Losses, chosen: Tensor) -> dict:
    """The loss of the chosen tokens [R, T], its growth, and the error of that; None where too few are chosen."""
    columns = f"{name}_loss_nats", f"{name}_change_nats", f"{name}_change_error_nats"
    if not chosen.any():
        return dict.fromkeys(columns)
    change, error = with_error(losses.nats - reference.nats, chosen)
    values = float(losses.nats[chosen].mean()), change, error if math.isfinite(error) else None
    return dict(zip(columns, values, strict=True))


# -- copies, codes and answers --------------------------------------------------------------------


def repeated(vocab_size: int, number: int, tokens: int, seed: int = 0) -> Tensor:
    """`number` documents [number, 2 tokens + 1] of random tokens, said twice: the second time can only be copied.

    To copy, attention must find the one earlier place of the same token, which asks for precise keys.
    """
    draw = torch.Generator().manual_seed(seed)
    once = torch.randint(vocab_size // 50, vocab_size * 4 // 5, (number, tokens), generator=draw)  # whole words, mostly
    return torch.cat((once, once, once[:, :1]), dim=1)


def copy_columns(losses: Losses, reference: Losses, documents: Tensor) -> dict:
    """Of the second time: the share whose first choice is right, and the loss."""
    second = torch.arange(losses.nats.shape[1]).expand_as(losses.nats) >= losses.nats.shape[1] // 2
    right = (losses.first_choice == documents[:, 1:])[second].float().mean()
    return {"copied_percent": 100 * float(right), **part_columns("copying", losses, reference, second)}


class HiddenCode(NamedTuple):
    """A question about one of the codes in a text, and the code's digits."""

    prompt_ids: list[int]
    code: str


DOORS = ("red", "blue", "green", "white", "black", "brown", "yellow", "purple")


def hidden_codes(tokenizer, corpus: Corpus, tokens: int, codes: int, seed: int = 0) -> list[HiddenCode]:
    """`codes` questions about one text of about `tokens` tokens that hides as many codes, evenly spread.

    All questions share the text, so an engine with a prefix cache computes it once. Each ends in a begun answer, so
    that the next tokens are the digits.
    """
    draw = random.Random(f"{seed} {tokens}")
    hidden = {door: f"{draw.randrange(10_000):04}" for door in draw.sample(DOORS, codes)}
    start = draw.randrange(len(corpus.ids) - CALIBRATION_TOKENS - tokens)
    filler, text = corpus.ids[start : start + tokens].tolist(), "Read this text. It hides the codes of some doors.\n\n"
    for place, (door, code) in enumerate(hidden.items()):
        piece = filler[place * tokens // codes : (place + 1) * tokens // codes]
        before, after = (tokenizer.decode(half) for half in (piece[: len(piece) // 2], piece[len(piece) // 2 :]))
        text += f"{before}\n\nThe code of the {door} door is {code}.\n\n{after}"
    return [HiddenCode(tokenizer.chat(f"{text}\n\nWhat is the code of the {door} door?")
                       + tokenizer.encode(f"The code of the {door} door is "), code) for door, code in hidden.items()]


def retrieved(engine: Engine, tokenizer, questions: Sequence[HiddenCode]) -> list[bool]:
    """Whether the engine names each code, greedily and to the digit. The first question computes the shared text."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)  # a digit is a token
    first = engine.generate([questions[0].prompt_ids], params)
    answers = first + engine.generate([question.prompt_ids for question in questions[1:]], params)
    return [tokenizer.decode(a.token_ids).strip() == q.code for a, q in zip(answers, questions, strict=True)]


def found_columns(found: dict[int, list[bool]], reference: dict[int, list[bool]]) -> dict:
    """Codes found by the length of their text, and how many of the reference's were lost."""
    row = {}
    for length, right in found.items():
        lost = sum(before and not now for before, now in zip(reference[length], right, strict=True))
        row |= {f"found_in_{length}_percent": 100 * sum(right) / len(right), f"asked_in_{length}": len(right),
                f"lost_in_{length}": lost}
    return row


def greedy_columns(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> dict:
    """How much of the reference's answers is the same, up to each one's first difference; {} of no answers."""
    if not outputs:
        return {}
    firsts = [at for got, want in zip(outputs, reference, strict=True) for at in first_divergence(got, want)]
    return {"greedy_agree_percent": 100 * agreement(outputs, reference), "answers": len(outputs),
            "answers_that_differ": len(firsts), "first_difference_at_token": min(firsts, default=None)}
