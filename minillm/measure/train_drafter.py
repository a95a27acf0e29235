"""How the drafter's weights were made, and can be made again: python -m minillm.measure.train_drafter.

Two stages, each resumable: what is on the disk is not done again.

    generate   the target answers seeded prompts in its own words; tokens and hidden states are kept
    train      the drafter learns, from the state before each token, what the target said next

A drafter need not know what is right, only what this target would say: it is distilled from
the target's own text and probabilities (Hinton et al., 2015; for drafters, Li et al., 2024).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from minillm.ladder.continuous import Row
from minillm.ladder.drafter import SHAPE, WEIGHTS, Drafter
from minillm.ladder.engine import Engine
from minillm.ladder.request import SamplingParams
from minillm.ladder.speculative import Speculator
from minillm.measure.measurement import current_commit
from minillm.model.llama import rms_norm
from minillm.model.source import DEFAULT, locate
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import SafetensorsDirectory, load_model

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
        self.model, self.kept = model, {}

    def prepare(self, config, num_blocks: int, block_size: int) -> None:
        """Nothing to prepare."""

    def propose(self, rows: Sequence[Row]) -> list[None]:
        """No drafts."""
        return [None] * len(rows)

    def observe(self, rows: Sequence[Row], slots: Tensor, hidden: Tensor) -> None:
        """hidden [N, H] of a step's tokens -> normed and in fp16, behind what its request has."""
        normed = rms_norm(hidden, self.model.norm, self.model.config.rms_norm_eps).half()
        for row, own in zip(rows, normed.split([len(row.tokens) for row in rows]), strict=True):
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


class CausalAttention:
    """The cache as training sees it: B texts of T tokens at once, nothing stored."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B T, Hq, D], k and v [B T, Hkv, D] -> [B T, Hq, D]."""
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))  # [B, heads, T, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)


def loss_of(drafter: Drafter, batch: Batch, draw: random.Random) -> tuple[Tensor, float]:
    """The loss of a batch, and the share of places where drafter and target would say the same.

    Half the states that the drafter reads are its own guesses in some batches, since all but
    the first draft of a round are made from guesses. The loss: cross-entropy against the
    target's probabilities over the drafter's ids, and the distance of the guessed states.
    """
    states, tokens = batch.states.float(), batch.tokens.flatten()
    size, length, _ = states.shape
    positions = torch.arange(length).repeat(size)
    before = F.pad(states, (0, 0, 1, 0))[:, :-1]  # [B, T, H]
    for _ in range(draw.choice((0, 0, 1, 2))):
        with torch.no_grad():
            guess = drafter.forward(tokens, positions, before.flatten(0, 1), CausalAttention(size)).view_as(states)
        guessed = torch.tensor([draw.random() < 0.5 for _ in tokens]).view(size, length, 1)
        before = torch.where(guessed, F.pad(guess, (0, 0, 1, 0))[:, :-1], before)
    guess = drafter.forward(tokens, positions, before.flatten(0, 1), CausalAttention(size)).view_as(states)
    guess, states = guess[batch.learn], states[batch.learn]  # [M, H]
    target, logits = drafter.head(states), drafter.head(guess)  # [M, V']
    entropy = F.cross_entropy(logits, target.softmax(-1))
    distance = F.smooth_l1_loss(guess / states.std(), states / states.std())
    return entropy + distance, float((logits.argmax(-1) == target.argmax(-1)).float().mean())


def first_tensors(model, texts: Texts, ids: int) -> dict[str, Tensor]:
    """What training begins with: the best linear guess at the next state, and the target's last layer, silent.

    The guess is a ridge regression from (state before, embedding) to the state, over all training
    texts. The layer adds nothing yet, since its two output projections are zero.
    """
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    of_target = SafetensorsDirectory(locate(DEFAULT))
    tensors = {name.replace(last, "model.layers.0."): of_target[name].float() for name in of_target if last in name}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"].zero_()
    size = 2 * model.config.hidden_size
    squares, products = torch.zeros(size, size), torch.zeros(size, size // 2)
    for tokens, states, _ in texts.training:
        embedded = F.rms_norm(model.embedding[tokens], (size // 2,), eps=model.config.rms_norm_eps)
        x = torch.cat((F.pad(states.float(), (0, 0, 1, 0))[:-1], embedded), dim=1)  # [T, 2 H]
        squares += x.T @ x
        products += x.T @ (states.float() / model.norm)  # without the final norm's weights, which `Drafter` applies
    ridge = 1e-3 * squares.diagonal().mean() * torch.eye(size)
    return tensors | {
        "fuse.weight": torch.linalg.solve(squares + ridge, products).T.contiguous(), "ids": texts.frequent_ids(ids)
    }


def trainable(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's own weights by name, as leaves that gradients reach."""
    layer = drafter.layer
    linears = zip(("qkv", "output", "gate_up", "down", "fuse"), (*layer.linears, drafter.fuse), strict=True)
    weights = {name: linear.weight for name, linear in linears}
    return weights | {"attention_norm": layer.attention_norm, "mlp_norm": layer.mlp_norm}


def train(
    model, texts: Texts, folder: Path, steps: int, seed: int, ids: int, most: float = 1e-3
) -> tuple[Drafter, dict]:
    """AdamW over `steps` batches, with a warm-up and a cosine; continues from the checkpoint in `folder`."""
    drafter = Drafter(model, first_tensors(model, texts, ids), packed=False)
    weights = trainable(drafter)
    optimizer = torch.optim.AdamW([w.requires_grad_() for w in weights.values()], lr=most, betas=(0.9, 0.95))
    path, done, told = folder / "checkpoint.pt", 0, {}
    if path.exists():
        saved = torch.load(path, weights_only=True)
        done = saved["step"]
        optimizer.load_state_dict(saved["optimizer"])
        for name, weight in weights.items():
            weight.data.copy_(saved["weights"][name])
    draw = random.Random(seed + done)
    for step, batch in zip(range(done, steps), itertools.islice(texts.batches(seed), done, None), strict=False):
        rate = most * min(1, 20 * (step + 1) / steps) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss, _ = loss_of(drafter, batch, draw)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if (step + 1) % 25 == 0 or step + 1 == steps:
            told = {"steps": step + 1, "training_loss": loss.item(), **validate(drafter, texts)}
            print(json.dumps({"time": time.strftime("%H:%M:%S"), **told}), flush=True)
            torch.save({"step": step + 1, "optimizer": optimizer.state_dict(), "weights": weights}, folder / "part.pt")
            (folder / "part.pt").rename(path)
    return drafter, told


@torch.no_grad()
def validate(drafter: Drafter, texts: Texts) -> dict:
    """Loss and agreement on texts that were not trained on; there, all states are the target's own."""
    class TrueStates(random.Random):
        def choice(self, options):
            return options[0]

    loss, same = loss_of(drafter, batch_of(texts.validation[:16]), TrueStates())
    return {"validation_loss": loss.item(), "validation_agreement": same}


def save(drafter: Drafter, path: Path, **card) -> None:
    """Weights in fp16 under transformers' names, and the card beside them."""
    config, layer = drafter.config, drafter.layer
    rows = [heads * config.head_dim for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    at, (gate, up) = "model.layers.0.", layer.gate_up.weight.chunk(2)
    tensors = dict(zip((f"{at}self_attn.{n}_proj.weight" for n in "qkv"), layer.qkv.weight.split(rows), strict=True))
    tensors |= {
        f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up,
        f"{at}self_attn.o_proj.weight": layer.output.weight, f"{at}mlp.down_proj.weight": layer.down.weight,
        f"{at}input_layernorm.weight": layer.attention_norm, f"{at}post_attention_layernorm.weight": layer.mlp_norm,
        "fuse.weight": drafter.fuse.weight,
    }
    halves = {name: tensor.detach().half().contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(halves | {"ids": drafter.ids.int()}, path)
    card = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), **card}
    path.with_suffix(".json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """The two stages, one after the other, or one of them."""
    parser = argparse.ArgumentParser(description=f"Make the drafter of {DEFAULT}.")
    parser.add_argument("stage", choices=("generate", "train", "all"), nargs="?", default="all")
    parser.add_argument("--folder", type=Path, default=Path("drafter-training"), help="where shards and checkpoints go")
    parser.add_argument("--shards", type=int, default=3, help="of 64 answers each")
    parser.add_argument("--steps", type=int, default=240, help="batches of 8 answers")
    parser.add_argument("--ids", type=int, default=12288, help="how many ids the drafter may propose")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 is faster on CPUs with AMX")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    own = parser.parse_args()
    torch.set_num_threads(own.threads)
    own.folder.mkdir(parents=True, exist_ok=True)
    if own.stage in ("generate", "all"):
        generate(load_model(dtype=own.dtype, device="cpu"), load_tokenizer(), own.folder, own.shards, own.seed)
    if own.stage in ("train", "all"):
        model, texts = load_model(dtype="fp32", device="cpu"), Texts(own.folder)
        with torch.autocast("cpu", torch.bfloat16, enabled=own.dtype == "bf16"):
            drafter, told = train(model, texts, own.folder, own.steps, own.seed, own.ids)
        save(
            drafter, own.out, target=DEFAULT, target_shape={name: getattr(model.config, name) for name in SHAPE},
            made_by="python -m minillm.measure.train_drafter",
            commit=current_commit(), seed=own.seed, dtype=own.dtype, ids=own.ids,
            texts=len(texts.training), tokens=texts.num_tokens, **told,
        )


if __name__ == "__main__":
    main()
