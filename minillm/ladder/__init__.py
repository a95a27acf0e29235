"""The ladder: the decode loop, one idea a file. Read decode, static, continuous, paged, in that order."""
