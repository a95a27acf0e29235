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

from minillm.load.fields import naming_damage, refuse_pointer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")  # in files of the llama architecture only

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types: plain, a special token, and text that is never split
ENDS = ("eos", "eot", "eom")  # the ids that end a text: of all, of a turn, of a message to a tool
SPECIAL_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # by transformers' name


class GGUFFile(UserDict[str, Tensor]):
    """The weights of a GGUF file by transformers' names, each dequantised to fp32 when it is read.

    Raises ValueError naming an unknown architecture, tensor, RoPE scaling or tokenizer.
    """

    def __init__(self, path: Path) -> None:
        refuse_pointer(path)
        try:
            self._reader = _reader(path)
        except Exception as error:  # the library checks nothing: a damaged length fails anywhere
            raise ValueError(f"{path} is damaged, or no GGUF: {error}") from error
        self.name, self.architecture = path.name, self.metadata("general.architecture")
        if not isinstance(self.architecture, str) or self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{path.name} has architecture {self.architecture!r}; this package reads {known}")
        self.data = {_transformers_name(entry.name): entry for entry in self._reader.tensors}

    def __getitem__(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        entry = self.data[name]
        try:
            tensor = torch.tensor(dequantize(entry.data, entry.tensor_type), dtype=torch.float32)
        except NotImplementedError as error:
            raise ValueError(f"{self.name}: {entry.name} cannot be dequantised: {error}") from error
        if self.architecture == "llama" and (match := PERMUTED.fullmatch(entry.name)):
            heads = self._size("attention.head_count")
            heads = heads if match[1] == "q" else self._size("attention.head_count_kv", heads)
            if len(tensor) % (2 * heads):
                raise ValueError(f"{self.name}: the {len(tensor)} rows of {entry.name} are not pairs in {heads} heads")
            tensor = unpermute(tensor, heads)
        return tensor

    def metadata(self, key: str, default: Any = None) -> Any:
        """The value stored under `key`, or the default."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _setting(self, key: str, default: Any = None) -> Any:
        return self.metadata(f"{self.architecture}.{key}", default)

    def _size(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; ValueError names a setting that is something else, or missing."""
        value = self._setting(key, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.name}: {self.architecture}.{key} {value!r:.60} is not a whole number from 1 up")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        """The number meant by a stored fp32: 1e-05, not 9.999999747378752e-06."""
        value = self._setting(key, default)
        if type(value) not in (int, float):
            raise ValueError(f"{self.name}: {self.architecture}.{key} {value!r:.60} is not a number")
        return float(str(numpy.float32(value)))

    def config(self) -> dict[str, Any]:
        """The file's settings as the config.json of transformers."""
        heads, hidden = self._size("attention.head_count"), self._size("embedding_length")
        head_dim, context = self._size("attention.key_length", hidden // heads), self._size("context_length")
        if (scaling := self._setting("rope.scaling.type", "none")) != "none":
            raise ValueError(f"RoPE scaling {scaling!r} of a GGUF is not supported; load the model's own directory")
        if (rotated := self._setting("rope.dimension_count", head_dim)) != head_dim:
            raise ValueError(f"RoPE over {rotated} of {head_dim} dimensions is not supported")
        if "model.embed_tokens.weight" not in self:
            raise ValueError(f"{self.name}: the weights lack token_embd.weight")
        ends = [self.metadata(f"tokenizer.ggml.{name}_token_id") for name in ENDS]
        return {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": int(self.data["model.embed_tokens.weight"].shape[1]),  # GGUF's axes run backwards
            "hidden_size": hidden,
            "intermediate_size": self._size("feed_forward_length"),
            "num_hidden_layers": self._size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", 10_000.0),
            "max_position_embeddings": min(context, self._size("attention.sliding_window", context)),
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
        tokens, merges = self._texts("tokens"), [tuple(merge.split(" ")) for merge in self._texts("merges")]
        ids = {name: self._token_id(name, len(tokens)) for name in {*ENDS, *SPECIAL_IDS.values()}}
        types = self._token_types(len(tokens), {ids[name] for name in ("bos", *ENDS)})
        with naming_damage(f"{self.name}: tokenizer"):
            tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
        tokenizer.normalizer, tokenizer.pre_tokenizer = _splitter(self.metadata("tokenizer.ggml.pre"))
        tokenizer.decoder = decoders.ByteLevel()
        added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
        tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in added])
        settings = {"chat_template": self.metadata("tokenizer.chat_template"), "clean_up_tokenization_spaces": False}
        settings |= {f"{name}_token": tokens[ids[key]] for name, key in SPECIAL_IDS.items() if ids[key] is not None}
        if self.metadata("tokenizer.ggml.add_bos_token", False):
            if ids["bos"] is None:
                raise ValueError(f"{self.name}: tokenizer.ggml.add_bos_token is set, but bos_token_id is missing")
            bos = tokens[ids["bos"]]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, ids["bos"])])
        return tokenizer, settings

    def _texts(self, key: str) -> list[str]:
        """A list of texts in the tokenizer's settings."""
        texts = self.metadata(f"tokenizer.ggml.{key}")
        if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            raise ValueError(f"{self.name}: tokenizer.ggml.{key} {texts!r:.60} is not a list of texts")
        return texts

    def _token_id(self, name: str, tokens: int) -> int | None:
        """The id of a special token, None where the file names none."""
        id = self.metadata(f"tokenizer.ggml.{name}_token_id")
        if id is not None and not (type(id) is int and 0 <= id < tokens):
            raise ValueError(f"{self.name}: tokenizer.ggml.{name}_token_id {id!r:.60} is not one of {tokens:,} tokens")
        return id

    def _token_types(self, tokens: int, special: set[int | None]) -> list[int]:
        """The type of each token; a file without them has normal ones, and those that begin and end a text."""
        types = self.metadata("tokenizer.ggml.token_type")
        if types is None:
            return [CONTROL if id in special else NORMAL for id in range(tokens)]
        if not (isinstance(types, list) and len(types) == tokens):
            raise ValueError(f"{self.name}: tokenizer.ggml.token_type is not a list of {tokens:,} types")
        return types


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


def _reader(path: Path):
    """The library's reader, which takes what stands after the end of a file for an empty value."""
    from gguf import GGUFReader  # only a conversion needs it

    class Reader(GGUFReader):
        def _get(self, offset, dtype, count=1, **order):
            found = super()._get(offset, dtype, count, **order)
            if len(found) < count:
                raise ValueError("it ends too early")
            return found

    return Reader(path)
