"""Small models on disk, written by us from known weights: GGUF files and Hugging Face directories."""

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minillm.load.config import ModelConfig
from minillm.load.tokenizer import BYTE_OF_CHARACTER

CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
SPECIAL = ("<bos>", "<eos>", "<end>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w")
TOKENS = [*SPECIAL, *BYTE_OF_CHARACTER, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def text_as_token(text: str) -> str:
    """How byte-level BPE spells a text inside its vocabulary."""
    return "".join(CHARACTER_OF_BYTE[byte] for byte in text.encode())


def byte_level_tokenizer() -> Tokenizer:
    """Every byte, five merges and three special tokens; ids as in TOKENS."""
    vocabulary = {token: id for id, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split()) for merge in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return tokenizer


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k in llama.cpp's order, one at a time: the pair (i, i + D/2) becomes (2i, 2i + 1)."""
    out = torch.empty_like(rows)
    head_dim = len(rows) // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            first = head * head_dim
            out[first + 2 * i] = rows[first + i]
            out[first + 2 * i + 1] = rows[first + head_dim // 2 + i]
    return out


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def write_gguf(path: Path, config: ModelConfig, tensors: dict, *, architecture: str | None = None, q8: bool = False,
               pre: str = "gpt-2", model: str = "gpt2", extra: dict | None = None) -> Path:  # fmt: skip
    """A GGUF of these weights. q8: quantise the matrices. extra: further metadata, or tensors."""
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    write_tokenizer(writer, pre, model)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value.numpy()) if isinstance(value, torch.Tensor) else writer.add_string(name, value)
    for name, tensor in tensors.items():
        if config.model_type == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = interleaved(tensor, heads)
        if q8 and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(writer: gguf.GGUFWriter, pre: str, model: str) -> None:
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(TOKENS.index("<bos>"))
    writer.add_eos_token_id(TOKENS.index("<eos>"))
    writer.add_eot_token_id(TOKENS.index("<end>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def hf_config(config: ModelConfig, **changes) -> dict:
    """The config.json that transformers would write; changes replace fields."""
    names = [
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings",
        "tie_word_embeddings", "attention_bias", "mlp_bias",
    ]  # fmt: skip
    return {name: getattr(config, name) for name in names} | {"hidden_act": "silu"} | changes


def write_directory(path: Path, config: dict, tensors: dict, **files: dict) -> Path:
    """A Hugging Face directory. files: further .json files by their stem."""
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    for stem, content in {"config": config, **files}.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    return path
