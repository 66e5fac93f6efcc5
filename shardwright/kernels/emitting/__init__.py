"""Emitters by family: what kernel calls an operator's node becomes."""
