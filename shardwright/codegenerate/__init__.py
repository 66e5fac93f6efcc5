"""Readable Python for each partition of a program: files that import torch and nothing else."""
