"""Command line and experiments (extra `experiments`). Never imported by the core."""
