"""A pytest plugin for a process of its own: after the last test the fused calls are
written to the file that FA_COUNTS names.

SPDX-License-Identifier: BSD-3-Clause
"""

import json
import os
from pathlib import Path


def pytest_sessionfinish(session):
    import flash_attn_rocm  # as late as possible: the tests say when it is imported

    counters = flash_attn_rocm.status()["counters"]
    Path(os.environ["FA_COUNTS"]).write_text(json.dumps(counters))
