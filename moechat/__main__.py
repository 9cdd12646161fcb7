"""``python -m moechat``: the same as the ``moechat`` command."""

import sys


def _start() -> int:
    from moechat.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(_start())
