"""What the drafter is trained on: the target's own answers to seeded prompts, with its hidden states.

They are written once, in shards, and a shard that is there is not made again.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minillm.fast.engine import Engine
from minillm.ladder.continuous import Row
from minillm.ladder.request import SamplingParams
from minillm.ladder.speculative import Speculator
from minillm.model.llama import rms_norm

# Prompts are every form with every topic: our own words, and none of those that anything is measured on.
FORMS = (
    "What is {}?", "Explain {} to a beginner.", "Why does {} matter?", "Tell me three facts about {}.",
    "Write a short story about {}.", "Write a short poem about {}.", "List the main parts of {}.",
    "What are the advantages and drawbacks of {}?", "Give me advice on {}.", "How did {} begin?",
    "Write an email to a friend about {}.", "Summarise what you know of {} in two sentences.",
    "What mistakes do people make with {}?", "Compare {} with something similar.",
    "Write step-by-step instructions about {}.", "Describe {} to a child.", "What will {} look like in fifty years?",
    "Ask me five quiz questions about {}, with answers.", "Write a dialogue between two people about {}.",
    "Write a Python program that has to do with {}.", "Make a table of contents for a book on {}.",
    "Write an advertisement for {}.", "What should I read about {}?", "Name ten words connected with {}.",
)
TOPICS = (
    "gardening", "the moon", "chess", "bread", "volcanoes", "learning a language", "electric cars", "sleep", "sorting",
    "the Roman Empire", "coffee", "glaciers", "job interviews", "cats", "prime numbers", "jazz", "a city library",
    "photosynthesis", "saving money", "bridges", "the human heart", "running a marathon", "rice", "honesty", "maps",
    "earthquakes", "open-source software", "a lost dog", "vaccines", "black holes", "knitting", "public transport",
    "dinosaurs", "a rainy day", "the internet", "solar panels", "friendship", "tea", "probability", "moving house",
    "whales", "the printing press", "camping", "clocks", "statistics", "recycling", "an old piano", "the brain",
    "cooking for guests", "robots", "desert plants", "football", "the stock market", "writing letters", "wind power",
    "the Silk Road", "fractions", "a night train", "healthy teeth", "penguins", "encryption", "photography", "soup",
    "the French Revolution", "time management", "spiders", "museums", "a school garden", "gravity", "theatre",
    "strings of text", "rivers", "meditation", "a broken computer", "salt", "elections", "owls", "bicycle repair",
)


def prompts(number: int, seed: int) -> list[str]:
    """Distinct prompts in an order that the seed decides."""
    pairs = list(itertools.product(FORMS, TOPICS))
    return [form.format(topic) for form, topic in random.Random(seed).sample(pairs, number)]


class HiddenStates:
    """A proposer that proposes nothing and keeps what the target's head was shown, request by request."""

    bytes_per_token = 0

    def __init__(self, model) -> None:
        self.model, self.kept, self.rows = model, {}, []

    def prepare(self, config, num_blocks: int, block_size: int, attention=None) -> None:
        """Nothing to prepare."""

    def propose(self, rows: Sequence[Row]) -> list[None]:
        """No drafts."""
        self.rows = rows
        return [None] * len(rows)

    def observe(self, slots: Tensor, hidden: Tensor) -> None:
        """hidden [N, H] of a step's tokens -> normed and in fp16, after what its request has."""
        normed = rms_norm(hidden, self.model.norm, self.model.config.rms_norm_eps).half()
        for row, own in zip(self.rows, normed.split([len(row.tokens) for row in self.rows]), strict=True):
            self.kept.setdefault(row.request.id, []).append(own)


def generate(model, tokenizer, folder: Path, shards: int, seed: int, size: int = 64, answer: int = 224) -> None:
    """Fill `folder` with shards of `size` answers each: tokens, lengths, and hidden states [tokens, H]."""
    asked = prompts(shards * size, seed)
    for shard in range(shards):
        path = folder / f"shard-{shard:03d}.safetensors"
        if path.exists():
            continue
        start, keeper = time.perf_counter(), HiddenStates(model)
        engine = Engine(model, tokenizer, max_batch=size, max_context=512, prefix_cache=False, seed=seed + shard,
                        speculator=Speculator(keeper, 1))
        temperatures = itertools.cycle((0.0, 0.7, 0.0, 1.0))
        params = [SamplingParams(answer, temperature=next(temperatures)) for _ in range(size)]
        done = engine.generate([tokenizer.chat(text) for text in asked[shard * size : (shard + 1) * size]], params)
        tokens = [torch.tensor(each.prompt_ids + each.token_ids[:-1]) for each in done]  # the last was never fed
        save_file({
            "tokens": torch.cat(tokens).int(), "lengths": torch.tensor([len(own) for own in tokens]),
            "prompts": torch.tensor([len(each.prompt_ids) for each in done]),
            "hidden": torch.cat([state for each in done for state in keeper.kept[each.request_id]]),
        }, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        speed = sum(map(len, tokens)) / (time.perf_counter() - start)
        print(f"{path.name}: {sum(map(len, tokens)):,} tokens, {speed:.0f} a second", flush=True)


@dataclass(frozen=True)
class Batch:
    """B answers of one length, the shorter ones padded."""

    tokens: Tensor  # [B, T]
    states: Tensor  # [B, T, H] the target's, behind each token, as its head is shown them
    learn: Tensor  # [B, T] whether the target chose what follows


class Texts:
    """All shards of a folder, held in memory; the last few texts are kept for validation."""

    def __init__(self, folder: Path, held_out: float = 0.04) -> None:
        shards = [load_file(path) for path in sorted(folder.glob("shard-*.safetensors"))]
        if not shards:
            raise FileNotFoundError(f"{folder} holds no shard-*.safetensors: run the stage `generate` first")
        texts = [text for shard in shards for text in zip(
            shard["tokens"].long().split(shard["lengths"].tolist()),
            shard["hidden"].split(shard["lengths"].tolist()), shard["prompts"].tolist(), strict=True,
        )]
        last = max(1, round(len(texts) * held_out))
        self.training, self.validation = texts[:-last], texts[-last:]
        self.num_tokens = sum(len(tokens) for tokens, _, _ in texts)

    def frequent_ids(self, number: int) -> Tensor:
        """The ids that the training texts hold most often [number], in ascending order.

        Those that they do not hold come lowest id first: a tokenizer numbers its tokens by how common they are.
        """
        counts = torch.cat([tokens for tokens, _, _ in self.training]).bincount(minlength=2 * number)
        return counts.argsort(descending=True, stable=True)[:number].sort().values

    def batches(self, seed: int, size: int = 8) -> Iterator[Batch]:
        """Training texts for ever, those of similar length together, in an order that the seed decides."""
        draw = random.Random(seed)
        while True:
            order = sorted(self.training, key=lambda text: len(text[0]) + draw.random() * 32)
            groups = [order[at : at + size] for at in range(0, len(order), size)]
            for group in draw.sample(groups, len(groups)):
                yield batch_of(group)


def batch_of(texts: Sequence[tuple[Tensor, Tensor, int]]) -> Batch:
    """Pad texts of (tokens [T], states [T, H], tokens of the prompt) to one shape."""
    tokens, states, prompts = zip(*texts, strict=True)
    learn = [torch.arange(len(own)) >= prompt - 1 for own, prompt in zip(tokens, prompts, strict=True)]
    return Batch(*(torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in (tokens, states, learn)))
