"""The laboratory: comparisons, the paper's claims, studies. Run from a checkout: `python -m lab`.

It needs the extra `lab` and is not in the wheel; the package never imports it.

A run (`settings`, `arms`) is trained by one trainer with callbacks (`trainer`, `callbacks`,
`looks`), planned and stored by one sweep (`sweep`, `store`), compared by one rule (`statistics`,
`tables`) and shown in one report (`page`). The demo, the paper's claims and the studies are presets
and data on top of these. CONTRIBUTING.md lists all files.
"""
