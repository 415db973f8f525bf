"""`python -m lab`."""

import sys

from lab.errors import missing_package

try:
    from lab.cli import main
except ModuleNotFoundError as error:
    message = missing_package(error)
    if message is None:
        raise
    sys.exit(f"lab: {message}")

sys.exit(main())
