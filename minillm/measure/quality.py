"""What a format costs in quality: real text, copies, a hidden number and greedy answers, each against fp32.

Text is the reference help that every Python carries (`pydoc_data.topics`). It is run through
the engine's own attention, so that every key and value that a token sees has been stored in
the format and read back. Losses are compared token by token with those of fp32 on the same
text: the difference has a far smaller error than either loss.

An error bar here is two standard errors of the mean over blocks of neighbouring tokens,
since the losses of neighbours are not independent.
"""

from __future__ import annotations

import hashlib
import math
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.fast.attention import FastAttention
from minillm.fast.engine import Engine
from minillm.ladder.attention import KVStorage, RowSpan
from minillm.ladder.request import SamplingParams

# The end of the text, which is never measured. As long as the longest context that is: rotary positions turn slow
# channels by less than a round in it, so their mean depends on how far the text goes.
CALIBRATION_TOKENS = 4096
ERROR_BLOCK = 64  # neighbouring tokens that count as one observation
FREQUENCY_BUCKETS = {"rare": (0, 10), "medium": (10, 200), "common": (200, math.inf)}  # occurrences: (more than, up to]
POSITION_BUCKETS = {"under_256": (0, 256), "256_to_1k": (256, 1024), "1k_to_2k": (1024, 2048), "2k_to_4k": (2048, 4096)}


@dataclass(frozen=True)
class Corpus:
    """A text as tokens [M], what it is, and how often each token of the vocabulary occurs in it [V]."""

    ids: Tensor
    occurrences: Tensor
    source: str
    sha256: str

    def documents(self, number: int, tokens: int) -> Tensor:
        """`number` pieces [number, tokens + 1], evenly spaced and clear of the calibration text.

        Raises ValueError if they would overlap.
        """
        usable = len(self.ids) - CALIBRATION_TOKENS
        if number * (tokens + 1) > usable:
            raise ValueError(f"{number} pieces of {tokens:,} tokens and one do not fit into the text's {usable:,}")
        return torch.stack([self.ids[i * usable // number :][: tokens + 1] for i in range(number)])

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


# -- the loss of each token -----------------------------------------------------------------------


@dataclass(frozen=True)
class Losses:
    """Of each predicted token: its loss in nats [R, T], and the model's first choice [R, T]."""

    nats: Tensor
    first_choice: Tensor


@torch.inference_mode()
def token_losses(model, documents: Tensor, storage_for: Callable[[int], KVStorage], chunk: int = 256) -> Losses:
    """Teacher forcing over documents [R, T + 1], `chunk` tokens a step, through a store made by `storage_for(slots)`.

    A step's own keys are read from the store too, so the chunk decides the speed alone.
    """
    rows = [_document_losses(model, document, storage_for(documents.shape[1]), chunk) for document in documents]
    return Losses(*(torch.stack(part) for part in zip(*rows, strict=True)))


def _document_losses(model, document: Tensor, storage: KVStorage, chunk: int) -> tuple[Tensor, Tensor]:
    """document [T + 1] -> losses [T] and first choices [T]."""
    document, config, parts = document.to(model.device), model.config, []
    for start in range(0, len(document) - 1, chunk):
        tokens = document[start : start + chunk + 1]  # [N + 1]: the last is only predicted
        span = RowSpan(start, len(tokens) - 1, [0])  # one block that is as long as the text
        cache = FastAttention(storage, [span], len(document), 0, config.query_group, model.dtype)
        logits = model.forward(tokens[:-1], cache.positions.to(model.device), cache).float()  # [N, V]
        parts.append((F.cross_entropy(logits, tokens[1:], reduction="none").cpu(), logits.argmax(-1).cpu()))
    nats, first_choice = (torch.cat(part) for part in zip(*parts, strict=True))
    return nats, first_choice


def with_error(values: Tensor, chosen: Tensor | None = None) -> tuple[float, float]:
    """The mean of the chosen values [R, T] (all if None), and two standard errors of it over blocks of neighbours.

    The error is infinite where all of them lie in one block, which tells nothing of it.
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


def loss_row(losses: Losses, reference: Losses, documents: Tensor, occurrences: Tensor) -> dict:
    """Perplexity, its change against the reference's, and the loss by token frequency and by position."""
    targets = documents[:, 1:]
    mean, error = with_error(losses.nats)
    change, change_error = with_error(losses.nats - reference.nats)
    row = {
        "tokens": targets.numel(),
        "perplexity": math.exp(mean),
        "perplexity_error": math.exp(mean) * error,
        "change_percent": 100 * math.expm1(change),
        "change_error_percent": 100 * math.exp(change) * change_error,
        "same_first_choice_percent": 100 * float((losses.first_choice == reference.first_choice).float().mean()),
    }
    positions = torch.arange(targets.shape[1]).expand_as(targets)
    for name, (low, high) in FREQUENCY_BUCKETS.items():
        count = occurrences[targets]
        row |= part_of_loss(f"{name}_tokens", losses, reference, (count > low) & (count <= high))
    for name, (low, high) in POSITION_BUCKETS.items():
        row |= part_of_loss(f"at_{name}", losses, reference, (positions >= low) & (positions < high))
    return row


def part_of_loss(name: str, losses: Losses, reference: Losses, chosen: Tensor) -> dict:
    """The loss of the chosen tokens [R, T], its growth, and the error of that; None where too few are chosen."""
    columns = f"{name}_loss_nats", f"{name}_change_nats", f"{name}_change_error_nats"
    if not chosen.any():
        return dict.fromkeys(columns)
    change, error = with_error(losses.nats - reference.nats, chosen)
    found = float(losses.nats[chosen].mean()), change, error if math.isfinite(error) else None
    return dict(zip(columns, found, strict=True))


# -- a text that is said twice --------------------------------------------------------------------


def repeated(vocab_size: int, number: int, tokens: int, seed: int = 0) -> Tensor:
    """`number` documents [number, 2 tokens + 1] of random tokens, said twice: the second time can only be copied.

    To copy, a token must find the one place before it that is like itself: attention at its most exact.
    """
    draw = torch.Generator().manual_seed(seed)
    once = torch.randint(vocab_size // 50, vocab_size * 4 // 5, (number, tokens), generator=draw)  # whole words, mostly
    return torch.cat((once, once, once[:, :1]), dim=1)


def copy_row(losses: Losses, reference: Losses, documents: Tensor) -> dict:
    """Of the second time: the share whose first choice is right, and the loss."""
    second = torch.arange(losses.nats.shape[1]).expand_as(losses.nats) >= losses.nats.shape[1] // 2
    right = (losses.first_choice == documents[:, 1:])[second].float().mean()
    return {"copied_percent": 100 * float(right), **part_of_loss("copying", losses, reference, second)}


# -- a number hidden in filler --------------------------------------------------------------------

DOORS = ("red", "blue", "green", "white", "black", "brown", "yellow", "purple")
ANSWER_TOKENS = 4  # a digit is a token


@dataclass(frozen=True)
class HiddenCode:
    """A question about one of the codes in a text, where in the text its sentence stands, and the digits."""

    prompt_ids: list[int]
    depth: float
    code: str


def hidden_codes(tokenizer, corpus: Corpus, tokens: int, codes: int, seed: int = 0) -> list[HiddenCode]:
    """`codes` questions about one text of about `tokens` tokens that hides as many codes, evenly spread.

    All questions share the text, so an engine with a prefix cache computes it once.
    """
    draw = random.Random(f"{seed} {tokens}")
    doors, numbers = draw.sample(DOORS, codes), [f"{draw.randrange(10_000):04}" for _ in range(codes)]
    start = draw.randrange(len(corpus.ids) - CALIBRATION_TOKENS - tokens)
    filler, parts = corpus.ids[start : start + tokens].tolist(), []
    for place, (door, number) in enumerate(zip(doors, numbers, strict=True)):
        piece = filler[place * tokens // codes : (place + 1) * tokens // codes]
        middle = len(piece) // 2
        parts += [tokenizer.decode(piece[:middle]), f"\n\nThe code of the {door} door is {number}.\n\n",
                  tokenizer.decode(piece[middle:])]
    text = "Read this text. It hides the codes of some doors.\n\n" + "".join(parts)
    return [
        HiddenCode(_question(tokenizer, text, door), (place + 0.5) / codes, number)
        for place, (door, number) in enumerate(zip(doors, numbers, strict=True))
    ]


def _question(tokenizer, text: str, door: str) -> list[int]:
    """A chat whose answer has been begun, so that the next tokens are the digits."""
    chat = tokenizer.chat(f"{text}\n\nWhat is the code of the {door} door?")
    return chat + tokenizer.encode(f"The code of the {door} door is ")


def retrieved(engine: Engine, tokenizer, questions: Sequence[HiddenCode]) -> list[bool]:
    """Whether the engine names each code, greedily and to the digit. The first question computes the shared text."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    first = engine.generate([questions[0].prompt_ids], params)
    answers = first + engine.generate([question.prompt_ids for question in questions[1:]], params)
    return [tokenizer.decode(a.token_ids).strip() == q.code for a, q in zip(answers, questions, strict=True)]
