"""Tiny random-weight transformers models: the proof that the pipeline works on real ones."""
