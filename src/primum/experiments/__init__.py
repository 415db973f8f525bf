"""The laboratory behind the command line (extra `experiments`). Never imported by the core."""
