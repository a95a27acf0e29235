"""How the drafter's weights were made, and can be made again: python -m minillm.course.drafter_training.training.

Three stages, resumable: what is on the disk is not done again.

    generate   the target answers seeded prompts in its own words; tokens and hidden states are kept
    train      the drafter learns, from the state before each token, what the target said next
    evaluate   acceptance by position on chat prompts that it was not trained on, for the card

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
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from minillm.course.drafter_training.text import Batch, Texts, batch_of, generate
from minillm.course.experiments.speculation import acceptance_by_position
from minillm.course.prompts import CHAT_PROMPTS
from minillm.extras.drafter import SHAPE, WEIGHTS, Drafter, DrafterProposer, load_drafter, read_card
from minillm.ladder.speculative import NgramProposer
from minillm.load.source import DEFAULT, locate
from minillm.load.tokenizer import load_tokenizer
from minillm.load.weights import SafetensorsDirectory, load_model
from minillm.measure.measurement import current_commit
from minillm.model.llama import Linear

WARM_UP = 50  # steps in which the learning rate rises: the layer is silent at first, and Adam's steps know no size


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
        states = states.float() / model.norm  # without the final norm's weights, as `Drafter` reads them
        x = torch.cat((F.pad(states, (0, 0, 1, 0))[:-1], embedded), dim=1)  # [T, 2 H]
        squares += x.T @ x
        products += x.T @ states
    ridge = 1e-3 * squares.diagonal().mean() * torch.eye(size)
    return tensors | {
        "fuse.weight": torch.linalg.solve(squares + ridge, products).T.contiguous(), "ids": texts.frequent_ids(ids)
    }


def trainable(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's own weights by name, as leaves that gradients reach."""
    layer = drafter.layer
    weights = {name: getattr(layer, name).weight for name in layer.LINEARS} | {"fuse": drafter.fuse.weight}
    return weights | {"attention_norm": layer.attention_norm, "mlp_norm": layer.mlp_norm}


def train(
    model, texts: Texts, folder: Path, steps: int, seed: int, ids: int, half: bool, most: float = 5e-4
) -> tuple[Drafter, dict]:
    """AdamW over `steps` batches, with a warm-up and a cosine; continues from the checkpoint in `folder`.

    half: whether to multiply in bf16; the weights stay in fp32.
    """
    drafter = Drafter(model, first_tensors(model, texts, ids), Linear)
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
        cosine = (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = most * min(1, (step + 1) / WARM_UP) * (0.05 + 0.95 * cosine)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss, _ = loss_of(drafter, batch, draw)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if (step + 1) % 25 == 0 or step + 1 == steps:
            told = {"steps": step + 1, "training_loss": loss.item(), **validate(drafter, texts)}
            print(json.dumps({"time": time.strftime("%H:%M:%S"), **told}), flush=True)
            torch.save({"step": step + 1, "optimizer": optimizer.state_dict(), "weights": weights}, folder / "part.pt")
            (folder / "part.pt").rename(path)
    return drafter, told or {"steps": done, **validate(drafter, texts)}


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
    write_card({"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), **card}, path)


def write_card(card: dict, path: Path) -> None:
    """What `read_card` reads."""
    path.with_suffix(".json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


def evaluate(model, tokenizer, path: Path, k: int = 4, prompts: int = 12) -> None:
    """Add to the card how many of its drafts are accepted, by position, beside those of prompt lookup."""
    asked = [tokenizer.chat(text) for text in CHAT_PROMPTS[:prompts]]
    shares = {
        f"{name}_acceptance_by_position": acceptance_by_position(model, proposer, asked, k)
        for name, proposer in (("drafter", DrafterProposer(load_drafter(model, path))), ("ngram", NgramProposer()))
    }
    write_card(read_card(path) | {"evaluated_prompts": len(asked), **shares}, path)


def main() -> None:
    """The stages, one after the other, or one of them."""
    parser = argparse.ArgumentParser(description=f"Make the drafter of {DEFAULT}.")
    parser.add_argument("stage", choices=("generate", "train", "evaluate", "all"), nargs="?", default="all")
    parser.add_argument("--folder", type=Path, default=Path("drafter-training"), help="where shards and checkpoints go")
    parser.add_argument("--shards", type=int, default=20, help="of 64 answers each")
    parser.add_argument("--steps", type=int, default=1500, help="batches of 8 answers")
    parser.add_argument("--ids", type=int, default=12288, help="how many ids the drafter may propose")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="to multiply in")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    own = parser.parse_args()
    torch.set_num_threads(own.threads)
    own.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer()
    if own.stage in ("generate", "all"):
        generate(load_model(dtype=own.dtype, device="cpu"), tokenizer, own.folder, own.shards, own.seed)
    model = load_model(dtype="fp32", device="cpu")
    if own.stage in ("train", "all"):
        texts = Texts(own.folder)
        drafter, told = train(model, texts, own.folder, own.steps, own.seed, own.ids, own.dtype == "bf16")
        save(
            drafter, own.out, target=DEFAULT, target_shape={name: getattr(model.config, name) for name in SHAPE},
            made_by="python -m minillm.course.drafter_training.training",
            commit=current_commit(), seed=own.seed, dtype=own.dtype, ids=own.ids,
            texts=len(texts.training), tokens=texts.num_tokens, **told,
        )
    if own.stage in ("evaluate", "all"):
        evaluate(model, tokenizer, own.out)


if __name__ == "__main__":
    main()
