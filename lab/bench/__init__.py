"""Benchmarks of time and memory: `python -m lab.bench.NAME`; results are in `results/`."""
