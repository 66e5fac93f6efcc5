"""Random programs, each held against eager PyTorch by every way through shardwright.

`grammar` draws a program as the text of a Python module, `ways` runs it, `worker` does so in a
process of its own, `fresh` runs what that wrote in another, and ``python -m fuzz`` drives them.
"""
