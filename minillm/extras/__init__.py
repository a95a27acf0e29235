"""Beyond the ladder: a trained drafter, adaptive draft lengths, calibrated key scaling, trace export.

For readers who have finished rung 6. Each plugs into a seam that the heart has anyway.
"""
