"""What can be wrong: bad requests and settings on entry, and bookkeeping that contradicts itself.

For users who get an error, and tests that want one. The heart calls it once, in `Engine.add`.
"""
