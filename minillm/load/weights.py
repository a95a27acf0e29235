"""Weights by name: from safetensors files, or at random; and `load_model`, which builds a model from them.

Every source is a mapping from transformers' tensor names to tensors that reads a tensor
when it is asked for one, and keeps none: a model being loaded is never in memory twice.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections import UserDict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.fast.memory import refuse_large_weights
from minillm.fast.model import FastLlama
from minillm.ladder.quantized import DTYPES
from minillm.load.config import ModelConfig
from minillm.load.fields import read_json, refuse_pointer
from minillm.load.gguf_file import GGUFFile
from minillm.load.source import DEFAULT, ModelNotFound, locate, model_name
from minillm.load.tokenizer import load_tokenizer

RANDOM = "random:"
HEAD = "lm_head.weight"
RANDOM_STD = 0.02  # the standard deviation these families are initialised with

log = logging.getLogger(__name__)


def load_model(
    name: str | os.PathLike = DEFAULT, device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto", seed: int = 0,
) -> FastLlama:
    """A model, ready to run.

    name: the default chat model; a directory with config.json and .safetensors; a .gguf file; a Hugging
    Face id `org/name`; or `random:<preset>`, a `ModelConfig.preset` with weights drawn from `seed`.
    device: "auto" takes CUDA, then Apple's MPS, then the CPU.
    dtype: "fp32", "bf16", "fp16"; "auto" is fp32, or on CUDA bf16 (fp16 before Ampere).
    Raises ValueError for an unknown name, an unsupported model, or one that does not fit in memory,
    ModelNotFound for missing files.
    """
    device = choose_device(device)
    dtype = _choose_dtype(dtype, device)
    if model_name(name).startswith(RANDOM):
        config = ModelConfig.preset(model_name(name).removeprefix(RANDOM))
        tensors = RandomTensors(config, device, dtype, seed)
    else:
        path = locate(name)
        if path.is_file():
            tensors = GGUFFile(path)
            config = ModelConfig.from_hf(tensors.config(), path.name)
        else:
            config, tensors = _read_directory(path)
        log.info("%s: a text ends at any of the ids %s", name, config.eos_token_id)
    with refuse_large_weights(sum(map(math.prod, tensor_shapes(config).values())), dtype, device):
        return make_model(config, tensors, device, dtype)


def make_model(
    config: ModelConfig, tensors: Mapping[str, Tensor], device="cpu", dtype=torch.float32, packed: bool = True
) -> FastLlama:
    """A model from tensors by transformers' names, each read once. packed: see `make_linear`.

    Raises ValueError naming the tensors that are missing, left over, of a wrong shape, or that
    contradict `tie_word_embeddings`.
    """
    shapes = tensor_shapes(config)
    names = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}
    if missing := [name for name in shapes if name not in names]:
        raise ValueError(f"the weights lack {missing[0]}, and {len(missing)} in all")
    if left := sorted(names - {HEAD, *shapes}):  # a tied model may bring its head as well
        raise ValueError(f"{len(left)} weights belong nowhere in this model, for example {', '.join(left[:3])}")
    model = FastLlama(config, CheckedTensors(shapes, tensors), device, dtype, packed)
    if HEAD in names - shapes.keys():
        head = tensors[HEAD].to(model.device, dtype)
        if not torch.equal(head, model.embedding):
            raise ValueError(
                "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight: "
                "set tie_word_embeddings to false, or drop lm_head.weight"
            )
    return model


class CheckedTensors(UserDict[str, Tensor]):
    """Tensors of which each is of the shape that the config asks for."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
        self.data, self.tensors = shapes, tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        if tuple(tensor.shape) != self.data[name]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the config asks for {self.data[name]}")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}: quantised weights are "
                             "read from a GGUF only")
        return tensor


class SafetensorsDirectory(UserDict[str, Tensor]):
    """The tensors of a directory's .safetensors files, mapped into memory and read one at a time.

    Of several shards the index says which one holds a tensor: a copy in another is not read. Raises
    ModelNotFound if there are none, since pickled weights are never opened; ValueError for a damaged file.
    """

    def __init__(self, directory: str | os.PathLike) -> None:
        directory = Path(directory)
        whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        listed = _weight_map(index) if index.is_file() and not whole.is_file() else {}
        files = [whole] if whole.is_file() else [directory / file for file in sorted(set(listed.values()))]
        files = files or sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelNotFound(f"{directory} holds no .safetensors; pickled weights (.bin, .pt) are not read")
        self.data = {}  # by tensor name, the open file it is in
        for path in files:
            if not os.path.isfile(path):
                raise ModelNotFound(f"{index} names {path.name}, which is not there")
            refuse_pointer(path)
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged, or incomplete: {error}") from error
            own = set(file.keys())
            names = {name for name in own if directory / listed.get(name, "") == path} if listed else own
            self.data |= dict.fromkeys(names, file)
        if absent := sorted(listed.keys() - self.data.keys()):
            raise ValueError(f"{index} puts {absent[0]} into {listed[absent[0]]}, which does not hold it")

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name].get_tensor(name)


def _weight_map(index: Path) -> dict[str, str]:
    """By tensor name, the file that an index says holds it."""
    listed = read_json(index).get("weight_map")
    if not (isinstance(listed, dict) and listed and all(isinstance(file, str) and file for file in listed.values())):
        raise ValueError(f"{index}: weight_map does not say for each tensor which file holds it")
    return listed


class RandomTensors(UserDict[str, Tensor]):
    """Weights of `config`'s shapes, drawn on the device: normal with deviation 0.02, norms at 1.

    A tensor depends on the seed and its own name alone, not on which were asked for before.
    """

    def __init__(self, config: ModelConfig, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype, self.seed = torch.device(device), dtype, seed
        self.data = tensor_shapes(config)

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.empty(self.data[name], device=self.device, dtype=self.dtype)
        if name.endswith("norm.weight"):
            return tensor.fill_(1)
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7]))
        return tensor.normal_(0, RANDOM_STD, generator=generator)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of a model by transformers' name, with its shape; a linear's is [out, in]."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    linears = {  # of a layer: out, in, and whether it has a bias
        "self_attn.q_proj": (q, hidden, config.attention_bias),
        "self_attn.k_proj": (kv, hidden, config.attention_bias),
        "self_attn.v_proj": (kv, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q, config.has_output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    layer = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    layer |= {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in linears.items()}
    layer |= {f"{name}.bias": (rows,) for name, (rows, _, has_bias) in linears.items() if has_bias}
    if config.has_qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    table = (config.vocab_size, hidden)
    shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    shapes |= {f"model.layers.{i}.{name}": layer[name] for i in range(config.num_hidden_layers) for name in layer}
    return shapes if config.tie_word_embeddings else shapes | {HEAD: table}


def _read_directory(directory: Path) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """Config and weights of a Hugging Face directory.

    A text ends at any id that any of the files calls its end: config.json is often left
    with the base model's, while generation_config.json and the tokenizer know the chat's.
    """
    if not (directory / "config.json").is_file():
        raise ModelNotFound(f"{directory} holds no config.json, so it is not a model's directory")
    config = ModelConfig.from_hf(read_json(directory / "config.json"), str(directory / "config.json"))
    if (generation := directory / "generation_config.json").is_file():
        config = config.with_eos(*read_json(generation).ids("eos_token_id", below=config.vocab_size))
    if (directory / "tokenizer.json").is_file():
        config = config.with_eos(*load_tokenizer(directory).eos_ids)
    return config, SafetensorsDirectory(directory)


def choose_device(device: str | torch.device) -> torch.device:
    """A device by name; ValueError for an unknown name, or a GPU that is not here."""
    if device != "auto":
        try:
            torch.empty(0, device=device)
            return torch.device(device)
        except (RuntimeError, AssertionError, TypeError) as error:  # the second from a PyTorch built without CUDA
            raise ValueError(f"device {device!r:.60} cannot be used here: {f'{error}'.splitlines()[0]}") from error
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """A dtype by name. Before Ampere (compute capability 8.0) CUDA only emulates bf16."""
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r:.60}: choose auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]
