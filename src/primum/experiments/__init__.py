"""Experiments behind the command line (extra `experiments`). Never imported by the core.

A run (`settings`, `arms`) is trained by one trainer with callbacks (`trainer`, `callbacks`,
`looks`), planned and stored by one sweep (`sweep`, `store`), compared by one rule (`statistics`,
`tables`) and shown in one report (`page`). The demo, the paper's claims and the studies are presets
and data on top of these. CONTRIBUTING.md lists all files.
"""
