"""What one process learns from the end of another, through the folder of state.

SPDX-License-Identifier: BSD-3-Clause
"""

import json
import os
import signal
import stat
import subprocess
import sys

import pytest
from helpers import ROOT, needs_simulator, run_forked

pytestmark = needs_simulator

# A call, and then the reason for its answer and what is known.
CALL = """
import json, os, signal, sys, threading, time
import torch
import torch.nn.functional as F
import flash_attn_rocm as fa
import hipsim
from flash_attn_rocm import _guard

fa.patch()
q = torch.randn(1, 2, 70, 64, generator=torch.Generator().manual_seed(0)).half()

def call(q=q):
    out = F.scaled_dot_product_attention(q, q, q)
    stock = torch._C._nn.scaled_dot_product_attention(q, q, q)
    assert (out.double() - stock.double()).abs().max() < 1e-2
    return fa.last_call().reason.value

def tell(*words):
    rows = [(b["kernel"], b["state"], b["failures"]) for b in fa.status()["breakers"]]
    complaints = fa.status()["guard"]["complaints"]
    print(json.dumps([*words, rows, complaints]), flush=True)  # also for os._exit
"""
FAULT = CALL + "hipsim.set_fault('launch:nth=1')\ntell(call())\n"
TELL = CALL + "tell(call())\n"
FORWARD = "fa_fwd_f16_d64_plain"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


def run(code, folder, check=True, **env):
    given = {
        "FLASH_ATTN_ROCM_DEVICE": "sim",
        "FLASH_ATTN_ROCM_CACHE_DIR": str(folder),
        "FLASH_ATTN_ROCM_COOLDOWN_S": "600",
        "HIPSIM_CHECK": "0",
        **env,
    }
    return run_forked(code, env=given, check=check)


def told(code, folder, **env):
    return json.loads(run(code, folder, **env).stdout.splitlines()[-1])


def test_an_open_breaker_is_open_in_the_next_process(folder):
    reason, rows, complaints = told(FAULT, folder)
    assert (reason, rows) == ("failed", [[FORWARD, "open", 1]])
    reason, rows, complaints = told(TELL, folder)
    assert (reason, rows, complaints) == ("breaker", [[FORWARD, "open", 1]], [])
    # After the cool-down the next one tries it, and closes it for all.
    path = next((folder / "sim").glob("breakers-*.txt"))
    assert FORWARD in path.read_text()
    told(CALL + "_guard.reset()\ntell(call())\n", folder)
    assert told(TELL, folder)[0] == "fused"


@pytest.mark.parametrize("value", ["", "~nosuch/state", "state-of-a-test", "{}/state"])
def test_unless_a_folder_was_named_the_simulator_leaves_the_users_cache_alone(
    tmp_path, value
):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    value = value.format(shared)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}
    done = run(FAULT, value, **env)
    reason, _, complaints = json.loads(done.stdout)
    assert (reason, complaints) == ("failed", [])
    warned = done.stderr.count("FLASH_ATTN_ROCM_CACHE_DIR: expected ")
    assert warned == (value != "") and done.stderr.count("\n") == warned + 1
    assert told(TELL, value, **env)[0] == "fused"
    assert [*tmp_path.iterdir()] == [shared] and not [*shared.iterdir()]
    assert not (ROOT / "~nosuch").exists() and not (ROOT / "state-of-a-test").exists()


# A call that takes seconds, in a thread, while the main thread ends the process.
FLYING = (
    CALL
    + """
call()
large = torch.randn(1, 4, 2000, 64).half()
threading.Thread(target=call, args=(large,), daemon=True).start()
time.sleep(0.3)
"""
)
ENDINGS = {
    "os.abort()": (-signal.SIGABRT, True),
    "os.kill(os.getpid(), signal.SIGKILL)": (-signal.SIGKILL, False),
    "os.kill(os.getpid(), signal.SIGTERM)": (-signal.SIGTERM, False),
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "os.kill(os.getpid(), signal.SIGINT)": (-signal.SIGINT, False),
    "os._exit(3)": (3, False),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_only_an_abort_is_blamed_on_what_was_in_flight(folder, ending):
    status, blamed = ENDINGS[ending]
    done = run(FLYING + ending + "\ntime.sleep(9)", folder, check=False)
    assert done.returncode == status
    reason, rows, _ = told(TELL, folder)
    assert (reason, rows) == (
        ("breaker", [[FORWARD, "open", 1]]) if blamed else ("fused", [])
    )
    if blamed:
        text = next((folder / "sim").glob("breakers-*.txt")).read_text()
        assert "in flight when its process aborted" in text


def test_an_abort_with_nothing_in_flight_blames_nobody(folder):
    assert run(CALL + "call()\nos.abort()", folder, check=False).returncode == -6
    assert told(TELL, folder)[:2] == ["fused", []]


def test_a_live_sibling_is_not_blamed(folder):
    env = dict(
        os.environ,
        FLASH_ATTN_ROCM_DEVICE="sim",
        FLASH_ATTN_ROCM_CACHE_DIR=str(folder),
        HIPSIM_CHECK="0",
    )
    program = FLYING + "print('flying', flush=True)\nsys.stdin.read()\nos._exit(0)\n"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as sibling:
        assert sibling.stdout.readline() == "flying\n"
        assert told(TELL, folder)[:2] == ["fused", []]
        sibling.stdin.close()


def test_a_forked_child_runs_fused_and_its_abort_is_not_its_parents(folder):
    program = FLYING + (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    assert call() == 'fused'\n"
        "    assert fa.status()['guard']['outstanding'] == 0\n"
        "    os.abort()\n"
        "status = os.waitpid(child, 0)[1]\n"
        "tell(os.waitstatus_to_exitcode(status), call())\n"
        "os._exit(0)\n"
    )
    status, reason, rows, _ = told("import faulthandler\n" + program, folder)
    assert (status, reason, rows) == (-signal.SIGABRT, "fused", [])
    assert told(TELL, folder)[:2] == ["fused", []]


def test_pythons_own_handler_of_aborts_still_runs(folder):
    program = (
        "import faulthandler\nfaulthandler.enable()\n" + CALL + "call()\nos.abort()"
    )
    done = run(program, folder, check=False)
    assert done.returncode == -signal.SIGABRT and "Fatal Python error" in done.stderr


@pytest.mark.parametrize("damage", ["", "nonsense", "\0" * 4096])
def test_a_bad_file_is_set_aside_with_one_warning(folder, damage):
    told(FAULT, folder)
    path = next((folder / "sim").glob("breakers-*.txt"))
    path.write_text(damage)
    done = run(TELL, folder)
    reason, rows, complaints = json.loads(done.stdout)
    assert (reason, rows) == ("fused", []) and len(complaints) == 1
    assert done.stderr.count("flash_attn_rocm:") == 1
    assert len(list((folder / "sim").glob("*.bad"))) == 1
    assert told(TELL, folder)[2] == []  # the next one is good again


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_write_is_not_trusted(folder, what):
    told(FAULT, folder)
    path = folder / "sim"
    if what == "file":
        path = next(path.glob("breakers-*.txt"))
    path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWOTH)
    before = {p.name: p.read_bytes() for p in (folder / "sim").iterdir()}
    done = run(FAULT, folder)
    reason, rows, complaints = json.loads(done.stdout)
    assert (reason, rows) == ("failed", [[FORWARD, "open", 1]])
    assert len(complaints) == 1 and done.stderr.count("not kept on disk") == 1
    after = {p.name: p.read_bytes() for p in (folder / "sim").iterdir()}
    if what == "folder":
        assert after == before


def test_a_folder_that_cannot_be_made_costs_the_record_not_the_call(tmp_path):
    (tmp_path / "file").write_text("")
    reason, _, complaints = told(TELL, tmp_path / "file" / "state")
    assert reason == "fused" and len(complaints) == 1


def test_the_process_may_end_with_work_in_flight(folder):
    """At the interpreter's end a thread is inside a call."""
    program = FLYING.replace("daemon=True", "daemon=False")
    assert run(program, folder).returncode == 0
    assert told(TELL, folder)[:2] == ["fused", []]
    assert not list((folder / "sim").glob("flight-*"))
