"""A pipeline file simulated task by task, as its workers walk it."""
