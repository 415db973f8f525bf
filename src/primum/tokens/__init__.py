"""Weights per token: which positions get one, and how many tokens are afforded.

layout.py    `per="auto"`: samples or tokens, decided by the first backward pass
sketch.py    an approximate Gram operator for many tokens and large vocabularies
"""
