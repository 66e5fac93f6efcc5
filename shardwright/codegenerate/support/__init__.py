"""What generated files use beside torch: each definition is pasted into a file that needs it.

Modules here import torch, the standard library and each other; nothing of them is imported by a
generated file.
"""
