"""Beyond the ladder: a trained drafter, adaptive draft lengths and bounded records, calibrated key scaling.

For readers who have finished rung 6. Each plugs into a seam that the heart has anyway.
"""
