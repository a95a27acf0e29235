"""The ladder: the decode loop, one idea a file. For every reader, in the order that the README lists."""
