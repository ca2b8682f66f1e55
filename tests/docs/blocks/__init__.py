"""Blocks of code on the pages of the documentation: found, and run or checked."""
