"""What makes the engine quick and changes none of its tokens: kernels, graphs, packed and quantised weights.

For readers who want the speed. It plugs into seams of the ladder, which is understood without it.
"""
