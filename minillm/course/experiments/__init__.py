"""The experiments: each a function that measures something and returns a `Measurement`."""
