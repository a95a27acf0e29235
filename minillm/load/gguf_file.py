"""GGUF, llama.cpp's file format, read as if transformers had written it: weights, config and tokenizer.

For the `llama` architecture the rows of the query and key projections are stored in another order, since
llama.cpp rotates neighbouring dimensions (0, 1), (2, 3), … where transformers rotates (0, D/2), (1, D/2 + 1), …
"""

from __future__ import annotations

import json
import re
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")  # in files of the llama architecture only

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip

CONTROL, USER_DEFINED = 3, 4  # token types: a special token, and text that is never split


class GGUFFile(UserDict[str, Tensor]):
    """The weights of a GGUF file by transformers' names, each dequantised to fp32 when it is read.

    Raises ValueError naming an unknown architecture, tensor, RoPE scaling or tokenizer.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader  # only a conversion needs it

        self._reader = GGUFReader(path)
        self.architecture = self.metadata("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{path.name} has architecture {self.architecture!r}; this package reads {known}")
        self.data = {_transformers_name(entry.name): entry for entry in self._reader.tensors}

    def __getitem__(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        entry = self.data[name]
        tensor = torch.tensor(dequantize(entry.data, entry.tensor_type), dtype=torch.float32)
        if self.architecture == "llama" and (match := PERMUTED.fullmatch(entry.name)):
            heads = self._setting("attention.head_count")
            tensor = unpermute(tensor, heads if match[1] == "q" else self._setting("attention.head_count_kv", heads))
        return tensor

    def metadata(self, key: str, default: Any = None) -> Any:
        """The value stored under `key`, or the default."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _setting(self, key: str, default: Any = None) -> Any:
        return self.metadata(f"{self.architecture}.{key}", default)

    def config(self) -> dict[str, Any]:
        """The file's settings as the config.json of transformers."""
        heads = self._setting("attention.head_count")
        head_dim = self._setting("attention.key_length") or self._setting("embedding_length") // heads
        if (scaling := self._setting("rope.scaling.type", "none")) != "none":
            raise ValueError(f"RoPE scaling {scaling!r} of a GGUF is not supported; load the model's own directory")
        if (rotated := self._setting("rope.dimension_count", head_dim)) != head_dim:
            raise ValueError(f"RoPE over {rotated} of {head_dim} dimensions is not supported")
        ends = [self.metadata(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": int(self.data["model.embed_tokens.weight"].shape[1]),  # GGUF's axes run backwards
            "hidden_size": self._setting("embedding_length"),
            "intermediate_size": self._setting("feed_forward_length"),
            "num_hidden_layers": self._setting("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._setting("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": _shortest(self._setting("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._setting("rope.freq_base", 10_000.0)),
            "max_position_embeddings": self._setting("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self,
            "hidden_act": "silu",
            "bos_token_id": self.metadata("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(id for id in ends if id is not None)),
        }

    def tokenizer(self) -> tuple[Tokenizer, dict[str, Any]]:
        """The tokenizer, and its settings as the tokenizer_config.json of transformers."""
        kind = self.metadata("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ValueError(f"tokenizer {kind!r} of a GGUF is not supported, only byte-level BPE ('gpt2')")
        tokens, types = self.metadata("tokenizer.ggml.tokens"), self.metadata("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.metadata("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
        tokenizer.normalizer, tokenizer.pre_tokenizer = _splitter(self.metadata("tokenizer.ggml.pre"))
        tokenizer.decoder = decoders.ByteLevel()
        added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
        tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in added])
        settings = {"chat_template": self.metadata("tokenizer.chat_template"), "clean_up_tokenization_spaces": False}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            if (id := self.metadata(f"tokenizer.ggml.{key}_token_id")) is not None:
                settings[f"{name}_token"] = tokens[id]
        if self.metadata("tokenizer.ggml.add_bos_token", False):
            bos = settings["bos_token"]
            special = [(bos, tokens.index(bos))]
            tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special)
        return tokenizer, settings


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Rows of q or k [heads * D, …] from llama.cpp's order, in which the rows of a rotated pair are neighbours.

    heads: the query heads for q, the KV heads for k.
    """
    pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])  # [heads, D/2, 2, …]
    return pairs.transpose(1, 2).reshape(tensor.shape)


def convert(source: Path, target: Path) -> None:
    """Write a GGUF as the directory transformers would have: config, tokenizer, and weights in fp32.

    Neither fp16 nor bf16 holds a 4-bit value, scale * q + minimum, exactly.
    """
    from safetensors.torch import save_file

    file = GGUFFile(source)
    config = file.config()
    tokenizer, settings = file.tokenizer()
    target.mkdir()
    save_file(dict(file), target / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    files = {
        "config": config | {"dtype": "float32"},
        "generation_config": {key: config[key] for key in ("bos_token_id", "eos_token_id")},
        "tokenizer_config": settings | {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, value in files.items():
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        (target / f"{name}.json").write_text(text, encoding="utf-8")


def _transformers_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; ValueError if unknown."""
    match = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[3] not in NAMES:
        raise ValueError(f"the GGUF holds a tensor {name!r}, which no supported architecture has")
    layer = f"model.layers.{match[2]}." if match[2] else ""
    return f"{layer}{NAMES[match[3]]}.{match[4]}"


def _splitter(name: str):
    """The normaliser and pre-tokeniser that a GGUF names: how text is cut before BPE merges."""
    by_words = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's pattern, then bytes as characters
    if name in ("gpt-2", "default"):
        return None, by_words
    if name == "smollm":
        return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_words])
    if name == "qwen2":
        words = pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return normalizers.NFC(), pre_tokenizers.Sequence([words, as_bytes])
    raise ValueError(f"pre-tokenizer {name!r} of a GGUF is not supported; known: default, gpt-2, qwen2, smollm")


QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _shortest(value: float) -> float:
    """The number meant by a stored fp32: 1e-05, not 9.999999747378752e-06."""
    return float(str(numpy.float32(value)))
