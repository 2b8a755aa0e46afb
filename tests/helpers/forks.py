"""Processes of their own that need not import torch again, which takes two seconds.

A server that has imported torch, and nothing of ours, forks for each program. One to
a process of pytest; it ends when that closes its pipe.

SPDX-License-Identifier: BSD-3-Clause
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# After the loop is the child. It ends as a script does: traceback, exit code, flushes.
# Frozen: or each child's collector would look at all of torch's objects, and copy them.
SERVER = """
import gc, json, os, signal, sys
given = list(os.environ)
import torch
gc.collect()
gc.freeze()
while True:
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
signal.alarm(job["timeout"])
for key in given:
    del os.environ[key]
os.environ.update(job["env"])
for number, name in enumerate(("/dev/null", job["stdout"], job["stderr"])):
    os.dup2(os.open(name, os.O_RDWR), number)
sys.argv = ["-c", *job["arguments"]]
exec(job["code"], {"__name__": "__main__"})
"""


@functools.cache
def _server(path):
    """The server with this PYTHONPATH. Nothing else of an environment is in the key:
    pytest writes the name of each test into it, and a server takes 200 MB."""
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def run_fork(code, arguments, base, env, timeout):
    """`code` in a fork of a process that has imported torch.

    Args:
        code: the program.
        arguments: its sys.argv[1:].
        base: the environment that programs of this kind have.
        env: what this one has besides.
        timeout: seconds, after which it is ended by SIGALRM.

    Returns:
        A subprocess.CompletedProcess, with text.
    """
    server = _server(base["PYTHONPATH"])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        job = dict(zip(("stdout", "stderr"), map(str, files)))
        arguments = list(map(str, arguments))
        job.update(code=code, arguments=arguments, timeout=timeout)
        job["env"] = {**base, **env}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        texts = [file.read_text() for file in files]
    return subprocess.CompletedProcess(["-c", *arguments], status, *texts)
