"""Offline batches: the prefix tree of all prompts, groups and their order, and the runner of batch files."""
