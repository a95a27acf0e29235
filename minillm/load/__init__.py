"""Where a model comes from: names and presets, safetensors and GGUF files, configs, tokenizers.

The heart gets a config, tensors and a tokenizer, and never opens a file.
"""

DEFAULT = "smollm2-135m-instruct"
