"""What notebooks and exercises need and an engine does not: experiments, the ledger, pictures, grading.

For learners and instructors. Nothing outside this folder and the command line imports it.
"""
