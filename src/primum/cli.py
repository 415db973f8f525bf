"""The command `primum`. The code behind a command is imported when it is run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from primum import __version__

DIGITS = 6  # of a count: a million runs or epochs
LABORATORY = ("compare", "inspect", "report", "reproduce")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in LABORATORY:
        print(
            f"primum: {words[0]} is not in the package; in a checkout of the repository: "
            f"python -m lab {words[0]}",
            file=sys.stderr,
        )
        return 2
    arguments = parser().parse_args(words)
    try:
        from primum.demo import demo, diagnose_demo

        if arguments.command == "diagnose":
            return diagnose_demo()
        return demo(arguments.seeds, arguments.epochs)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("sklearn", "scipy"):
            raise
        needs = f"primum: {arguments.command} needs scikit-learn; in a clone of the repository: "
        print(f"{needs}pip install '.[demo]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    made = argparse.ArgumentParser(
        prog="primum",
        description="Reduce the harm an optimizer step does to samples of its own batch.",
        epilog=f"python -m lab, in a checkout of the repository, has {', '.join(LABORATORY)}.",
    )
    made.add_argument("--version", action="version", version=f"primum {__version__}")
    commands = made.add_subparsers(
        title="commands", required=True, dest="command", metavar="command"
    )
    about = "train a small network with and without primum, in less than a minute"
    demo = commands.add_parser("demo", help=about, description=f"{about.capitalize()}.")
    demo.add_argument("--seeds", type=_count, default=5, metavar="N", help="runs per arm (5)")
    demo.add_argument("--epochs", type=_count, default=15, metavar="N", help="per run (15)")
    about = "say whether primum is likely to help, after 40 steps on handwritten digits"
    own = "For your own model, call primum.diagnose(model, optimizer, batches, loss_fn)."
    diagnose = commands.add_parser(
        "diagnose", help=about, description=f"{about.capitalize()}.", epilog=own
    )
    diagnose.add_argument("--demo", action="store_true", required=True, help="required; see below")
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text[:40]}")
    if len(text) > DIGITS:
        raise argparse.ArgumentTypeError(f"must have at most {DIGITS} digits, got {text[:40]}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
