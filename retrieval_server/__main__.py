"""``python -m retrieval_server``: serve, or ``build``, ``verify``, ``import``: make and check indexes."""

import sys


def _main() -> int:
    from .index.command import COMMANDS

    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        from .index.command import main as command

        return command(sys.argv[1:])
    from .serve import main

    return main()


if __name__ == "__main__":
    sys.exit(_main())
