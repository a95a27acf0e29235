"""A drafter of one decoder layer over the target's last hidden states (EAGLE: Li et al., 2024).

    place j        reads  token j  and  the target's hidden state after token j - 1
                   gives  a guess at the hidden state after token j, and through the head, at token j + 1

The guess stands in for the hidden state when it drafts a second token, a third, and so on; once the
target has verified them, the places are fed again with its own states. The drafter shares the target's
embedding and head. Of the head it keeps the rows of the ids that the target's texts are made of:
reading all 49,152 would cost several times the layer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor
from torch.nn import functional as F

from minillm.extras.draft_model import DraftModelProposer
from minillm.ladder.attention import StepAttention
from minillm.ladder.continuous import Row
from minillm.model.config import ModelConfig
from minillm.model.llama import CacheView, DecoderLayer, Llama, Weights, rms_norm, rotation_for

SHAPE = ("hidden_size", "vocab_size", "num_hidden_layers")  # by which a card tells targets apart
WEIGHTS = Path(__file__).parent.parent / "weights" / "smollm2-135m-instruct-drafter.safetensors"


class Drafter:
    """The layer, what joins its two inputs, and the rows of the target's head that it may propose."""

    def __init__(self, target: Llama, tensors: Mapping[str, Tensor], linear=None) -> None:
        """tensors: `fuse.weight` [H, 2 H], `ids` [V'], and a decoder layer under transformers' names.

        Raises ValueError where they do not fit the target.
        """
        self.target, self.device, self.dtype = target, target.device, target.dtype
        self.config = replace(target.config, num_hidden_layers=1)
        if not self.config.tie_word_embeddings:
            raise ValueError("the drafter shares the target's embedding as its head; this target's head is another")
        linear = linear or target.linear
        weights = Weights(tensors, self.device, self.dtype, linear)
        self.layer = DecoderLayer(self.config, weights, 0)
        self.fuse = weights.linear("fuse")
        self.ids = tensors["ids"].long().to(self.device)  # [V']
        if int(self.ids.max()) >= self.config.vocab_size:
            raise ValueError(f"the drafter proposes id {int(self.ids.max())}; the target has {self.config.vocab_size}")
        self.head = linear(target.embedding[self.ids])  # [V', H]

    def forward(self, tokens: Tensor, positions: Tensor, before: Tensor, cache: CacheView) -> Tensor:
        """tokens [N], positions [N], before [N, H]: the state before each -> a guess at the state after it [N, H].

        States are after the target's final norm, whose weights are undone here: both inputs are of size 1.
        """
        embedded = F.embedding(tokens, self.target.embedding)  # [N, H]
        scaled = F.rms_norm(embedded, embedded.shape[-1:], eps=self.config.rms_norm_eps)
        x = self.fuse(torch.cat((before / self.target.norm, scaled), dim=-1))
        rotation = rotation_for(positions, self.target.inverse_frequencies, self.dtype)
        return self.norm(self.layer.forward(x, rotation, cache))

    def norm(self, hidden: Tensor) -> Tensor:
        """The target's final norm over hidden states [N, H]."""
        return rms_norm(hidden, self.target.norm, self.config.rms_norm_eps)


class DrafterProposer(DraftModelProposer):
    """Drafts by a `Drafter`, whose keys and values lie under the same block ids, as do the target's states.

    A place may be fed once the state before it is known: so a prompt is read in the first round and not
    along with the target, and after a round the places of its drafts are fed again, with true states.
    """

    keeps_drafts = False  # computed from a guessed state

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.bytes_per_token += drafter.config.hidden_size * drafter.dtype.itemsize  # the state in each slot

    def prepare(self, config: ModelConfig, num_blocks: int, block_size: int, attention=StepAttention) -> None:
        """Make the storage. Raises ValueError if it serves an engine already, or the engine's is another target."""
        target = self.model.target.config
        if (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
            raise ValueError(
                f"the drafter is for {target.hidden_size} hidden and {target.vocab_size:,} ids; "
                f"this model has {config.hidden_size} and {config.vocab_size:,}"
            )
        super().prepare(config, num_blocks, block_size, attention)
        self.none_before = self.scratch + 1  # what stands before the first token: zeros
        self.states = torch.zeros(self.none_before + 1, config.hidden_size, dtype=self.model.dtype,
                                  device=self.model.device)  # [slots, H]
        self.guessed: dict[int, Tensor] = {}  # by row, the guess at the state after its newest token or draft

    def observe(self, slots: Tensor, hidden: Tensor) -> None:
        """Keep the target's states [N, H] of a step's tokens, in the slots [N] of their keys and values."""
        self.states[slots] = self.model.norm(hidden)

    def reads(self, row: Row) -> bool:
        """Not prompts: the states of this step's tokens are not known yet."""
        return row.num_drafts > 0

    def logits(self, rows: Sequence[Row], ids: Tensor, positions: Tensor, cache: StepAttention, last: Tensor) -> Tensor:
        """-> logits [rows, V], of which only the drafter's own ids can be drafted."""
        if any(span.start >= row.end for row, span in zip(rows, cache.spans, strict=True)):  # its newest draft
            before = torch.stack([self.guessed[id(row)] for row in rows])  # [N, H]
        else:
            slots = [span.slots(self.block_size) for span in cache.spans]
            slots = [F.pad(own, (1, 0), value=self.none_before)[span.start : -1]  # of the token before each
                     for own, span in zip(slots, cache.spans, strict=True)]
            before = self.states[torch.cat(slots).to(ids.device)]  # [N, H]
        x = self.model.forward(ids, positions, before, cache)[last]  # [rows, H]
        self.guessed = dict(zip(map(id, rows), x, strict=True))
        logits = x.new_full((len(x), self.vocab_size), -torch.inf)
        logits[:, self.model.ids] = self.model.head(x)
        return logits


def read_card(path: Path = WEIGHTS) -> dict:
    """What is known of the drafter: for which target, how it was made, and what it reached."""
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def fits(target: Llama, card: Mapping) -> bool:
    """Whether a target has the shape of the one that the drafter was trained for."""
    return all(getattr(target.config, name) == value for name, value in card["target_shape"].items())


def load_drafter(target: Llama, path: Path = WEIGHTS) -> Drafter:
    """The drafter of SmolLM2-135M-Instruct, with its card; ValueError where the file or the target is another one."""
    card, data = read_card(path), path.read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != card["sha256"]:
        raise ValueError(f"{path.name} is damaged: its sha256 is {found}, its card says {card['sha256']}")
    if not fits(target, card):
        raise ValueError(f"this drafter is for {card['target']}, of {card['target_shape']}; {target.config} is another")
    return Drafter(target, load(data))
