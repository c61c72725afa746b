"""python -m mosaic_c, and the command of that name. Ctrl-C while modules load ends like any other."""

import sys


def main() -> int:
    try:
        from mosaic_c.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
