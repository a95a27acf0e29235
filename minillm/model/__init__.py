"""Tensors only: the decoder, its weights and its tokenizer. Nothing here knows of requests."""
