"""What "the same as transformers" means here, and twin models to show it on.

Two programs that both compute in fp32 still differ in the last bits, since the order of a
sum depends on shapes and threads. So tokens are compared only where the reference was
decided: up to the first step at which its two likeliest tokens were closer than a stated
tolerance. A text may part ways there, and is then not compared further.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple

import torch
import transformers
from tiny import SHAPES

from minillm.ladder.decode import NoCache
from minillm.load.config import ModelConfig
from minillm.load.weights import load_model, make_model
from minillm.model.llama import Llama

FAMILIES = {
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
}
MARGIN = 1e-3  # fp32: logits of these models differ by up to 1e-4, so a pair 1e-3 apart keeps its order
SPREAD = 0.2  # deviation of random weights; at 0.08 a tied model says one token over and over, which hides faults


class Reference(NamedTuple):
    """A greedy text, and by how much each step's likeliest token beat the second."""

    tokens: list[int]
    margins: list[float]


class Divergence(NamedTuple):
    """The first place where a text leaves its reference, and the reference's margin there."""

    index: int
    margin: float


def greedy_reference(model, prompt: Sequence[int], n: int, stop_ids: Collection[int] = ()) -> Reference:
    """At most n greedy tokens after `prompt`, ending with the first that is in `stop_ids`.

    model: one of transformers', asked through its own `generate`; or a `Llama`, which
    recomputes everything at every step.
    """
    logits = (_of_our_model if isinstance(model, Llama) else _of_transformers)(model, list(prompt), n, stop_ids)
    top = logits.topk(2).values  # [n, 2]
    return Reference(logits.argmax(-1).tolist(), (top[:, 0] - top[:, 1]).tolist())


def _of_transformers(model, prompt: list[int], n: int, stop_ids: Collection[int]) -> torch.Tensor:
    """The logits [n, V] from which `generate` chose."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, pad_token_id=0,
        eos_token_id=sorted(stop_ids) or None, output_logits=True, return_dict_in_generate=True,
    )
    logits = torch.cat(out.logits).float()
    assert out.sequences[0, len(prompt) :].tolist() == logits.argmax(-1).tolist(), "this is not greedy decoding"
    return logits


def _of_our_model(model: Llama, prompt: list[int], n: int, stop_ids: Collection[int]) -> torch.Tensor:
    ids, rows = list(prompt), []
    while len(rows) < n and not (rows and ids[-1] in stop_ids):
        rows.append(logits_of(model, ids)[-1:].float())
        ids.append(int(rows[-1].argmax()))
    return torch.cat(rows)


def first_divergence(got: Sequence[int], reference: Reference) -> Divergence | None:
    """Where `got` leaves the reference; None if it does not.

    A text that ends too early or goes on too long is no near tie: its margin is infinite.
    """
    for index, (token, wanted, margin) in enumerate(zip(got, *reference, strict=False)):
        if token != wanted:
            return Divergence(index, margin)
    if len(got) != len(reference.tokens):
        return Divergence(min(len(got), len(reference.tokens)), float("inf"))
    return None


def assert_same_tokens(got: Sequence[int], reference: Reference, tolerance: float = MARGIN) -> Divergence | None:
    """Fail if `got` leaves the reference where its margin exceeds `tolerance`; report a closer call as a warning."""
    divergence = first_divergence(got, reference)
    if divergence is None:
        return None
    index, margin = divergence
    said = f"the texts part at token {index}, where the reference's top-2 margin is {margin:.2g}"
    assert margin <= tolerance, f"{said}, above the tolerance {tolerance:.2g}:\n{list(got)} is not\n{reference.tokens}"
    warnings.warn(f"{said}, within the tolerance {tolerance:.2g}", stacklevel=2)
    return divergence


class Twins(NamedTuple):
    """One set of weights in transformers and in this package."""

    theirs: transformers.PreTrainedModel
    ours: Llama


@cache
def twins(shape: str = "t8-2", family: str = "llama", packed: bool | str = True, seed: int = 0, **fields) -> Twins:
    """A random model of a shape of `tiny.SHAPES`. `fields` are transformers' config fields.

    packed: of the fast model; "heart" makes the plain `Llama`. A tied model ships its head twice,
    as transformers' state_dict does.
    """
    config = hf_config(shape, family, **fields)
    theirs = random_hf_model(family, config, seed)
    shape, tensors = ModelConfig.from_hf(config.to_dict()), theirs.state_dict()
    return Twins(theirs, Llama(shape, tensors) if packed == "heart" else make_model(shape, tensors, packed=packed))


def hf_config(shape: str, family: str, **fields) -> transformers.PreTrainedConfig:
    """transformers' config of a tiny model. No token ends a text, unless `fields` name one."""
    common = dict(
        vocab_size=97, intermediate_size=128, num_hidden_layers=2, max_position_embeddings=16_384,
        rms_norm_eps=1e-3,  # nobody's default, so that a default in its place shows
        sliding_window=None, bos_token_id=None, eos_token_id=None,
    )
    return FAMILIES[family].config_class(**{**common, **SHAPES[shape], **fields})


def random_hf_model(family: str, config: transformers.PreTrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """Every weight and bias random, biases and norms too: what is left at 0 or 1 cannot be seen to be missing."""
    config._attn_implementation = "eager"  # softmax written out: another way to compute it than ours
    model = FAMILIES[family](config).eval()
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, SPREAD, generator=make)
    return model


@cache
def smollm2_twins(directory) -> Twins:
    """SmolLM2 in both, from one directory, in fp32."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return Twins(theirs, load_model(directory, device="cpu", dtype="fp32"))


def logits_of(model, ids: Sequence[int], positions: Sequence[int] | None = None) -> torch.Tensor:
    """Logits [N, V] after each of `ids`, without a cache, from either kind of model.

    positions: 0, 1, … by default. With a gap in them, what matters to RoPE are the distances;
    equal shifts of all change nothing.
    """
    tokens = torch.tensor(ids)
    at = torch.arange(len(ids)) if positions is None else torch.tensor(positions)
    with torch.inference_mode():
        if isinstance(model, Llama):
            return model.forward(tokens, at, NoCache())
        # with no mask, transformers would take a gap in the positions for the start of another text
        mask = torch.ones(1, len(ids), dtype=torch.long)
        return model(tokens[None], position_ids=at[None], attention_mask=mask).logits[0]


def random_ids(n: int, seed: int = 0, vocabulary: int = 97) -> list[int]:
    """n token ids."""
    return torch.randint(vocabulary, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
