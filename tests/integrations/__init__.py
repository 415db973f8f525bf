"""Tests of `primum.integrations`. What every framework must reproduce is in `plain.py`."""
