"""The automatic planner: a search over meshes, cuts, splits, schedules and microbatches."""
