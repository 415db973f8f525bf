"""Tests of `primum.paper`. The oracle of every algorithm is `transcribed.py`."""
