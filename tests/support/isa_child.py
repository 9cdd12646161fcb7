"""Runs pytest once for every instruction set on stdin, with one import of torch: ARGUMENTS...

For each line it forks, sets ``MOECHAT_ISA`` and runs pytest with the arguments; then it prints the status and
the output as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import pytest
import tiny  # noqa: F401 - torch and transformers
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.qwen3_moe.modeling_qwen3_moe
import transformers.models.qwen3_next.modeling_qwen3_next  # noqa: F401


def run(isa: str, output: int) -> int:
    """Run the tests in this process, which has not used the native code yet."""
    os.environ["MOECHAT_ISA"] = isa
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    from moechat import _native

    assert _native.active_isa() == isa
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))


def main() -> None:
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    status = run(line.strip(), output.fileno())
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            _, status = os.waitpid(child, 0)
            output.seek(0)
            text = output.read().decode(errors="replace")
            print(json.dumps([os.waitstatus_to_exitcode(status), text]), flush=True)


if __name__ == "__main__":
    main()
