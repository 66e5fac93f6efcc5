"""Turns a PyTorch program for one device into a checked, portable pipeline for many, and runs it."""
