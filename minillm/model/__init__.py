"""The decoder: its shape and its forward pass. Tensors only; for every reader, first."""
