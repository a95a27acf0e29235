"""What makes the engine quick and changes none of its tokens: kernels, graphs, packed and quantised weights.

For whoever wants the speed. Nobody needs it to understand the ladder, whose seams it plugs into.
"""
