"""Worker groups with real processes: what they carry, how they fail, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from areal_like.alloc import DiagnosticError
from areal_like.runtime.local import WorkerError, WorkerGroup

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_gone(pids, seconds=5.0):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


@contextlib.contextmanager
def group(world_size=1, **kwargs):
    options = {k: kwargs.pop(k) for k in ("threads", "setup_timeout", "log_dir", "independent") if k in kwargs}
    made = WorkerGroup.start("host", "runtime_hosts:Host", kwargs, world_size, **options)
    pids = made.process_ids
    try:
        yield made
    finally:
        made.close()
        assert wait_gone(pids) == []


@pytest.fixture(scope="module")
def pair():
    with group(2, greeting="hi") as made:
        made.call("join")
        yield made


def test_calls_and_their_arguments(pair):
    assert pair.call("hello", 1, a=2) == [("hi", 0, (1,), {"a": 2}), ("hi", 1, (1,), {"a": 2})]
    assert pair.call_each("hello", [(1,), (2, 3)]) == [("hi", 0, (1,), {}), ("hi", 1, (2, 3), {})]
    assert pair.submit_one(1, "hello").result() == [("hi", 1, (), {})]
    with pytest.raises(ValueError, match="2 ranks; got arguments for 1"):
        pair.call_each("hello", [()])


def test_collectives_and_environment(pair):
    assert pair.call_each("total", [(1,), (10,)]) == [11.0, 11.0]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
    assert pair.call("environment", *names)[1] == ["1", "1", "2", "1", "", "lo", 1]


def test_variables_that_a_group_is_started_with(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    with WorkerGroup.start("own", "runtime_hosts:Host", {}, 1, environment={"NCCL_ALGO": "Ring", "X": "1"}) as group:
        assert group.call("environment", "NCCL_ALGO", "X")[0][:2] == ["Ring", "1"]


def test_nothing_listens_beyond_loopback(pair):
    for addresses in pair.call("listening"):
        for address in addresses:  # little-endian hexadecimal of 127.x.x.x, or ::1, or ::ffff:127.x.x.x
            host = address.rpartition(":")[0]
            assert host.endswith("7F") or host == "00000000000000000000000001000000", address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.uint8])
def test_tensors_arrive_bit_equal_and_writable(pair, dtype):
    values = {
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "transposed": torch.arange(6).reshape(2, 3).to(dtype).T,
        "large": torch.arange(100_000).to(dtype),
    }
    for answer in pair.call("echo", values):
        assert answer.keys() == values.keys()
        for name, tensor in answer.items():
            assert tensor.dtype == dtype and torch.equal(tensor, values[name])
            tensor.fill_(0)
    assert values["large"][1] == 1


def test_receivers_do_not_share_memory(pair):
    sent = {"x": torch.ones(50_000)}
    for answer in pair.call("double", sent):
        assert torch.equal(answer["x"], torch.full((50_000,), 2.0))
    assert torch.equal(sent["x"], torch.ones(50_000))


def test_hundreds_of_tensors_use_no_descriptors(pair):
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    kept = [pair.call("echo", {f"w{i}": torch.full((200,), float(i)) for i in range(1500)}) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert kept[2][1]["w1499"][0] == 1499


def test_a_view_sends_its_own_bytes_only():
    from areal_like.runtime.wire import Packet

    assert len(Packet(torch.zeros(10_000_000)[:3]).frame) < 1000


def test_stream_comes_in_order_with_back_pressure(pair):
    already = len(pair.call("seen_so_far")[0])
    items = iter(pair.stream("count", 20, only=0))
    assert next(items) == (0, 0)
    time.sleep(0.3)  # the generator would be through by now
    rest = list(items)
    assert rest == [(0, i) for i in range(1, 20)]
    assert len(pair.call("seen_so_far")[0]) == already + 20


def test_stream_produces_no_more_than_its_credit(pair):
    items = pair.stream("count", 1000)
    assert next(items)[1] == 0
    time.sleep(0.3)
    pair_progress = pair.submit("seen_so_far")  # queued behind the stream, answered after it
    assert not pair_progress.done()
    items.close()  # the generators run to their end
    assert [seen[-1] for seen in pair_progress.result(20)] == [999, 999]


def test_interrupt_reaches_busy_workers(pair):
    pending = pair.submit("until_interrupted")
    assert not pending.done()
    pair.interrupt()
    assert pending.result(10) == ["interrupted", "interrupted"]
    pair.clear_interrupt()
    started = time.monotonic()
    pending = pair.submit("until_interrupted")
    time.sleep(0.3)
    assert not pending.done() and time.monotonic() - started < 5
    pair.interrupt()
    pending.result(10)
    pair.clear_interrupt()


def test_an_exception_ends_the_group_though_its_peer_waits_for_it():
    with group(2) as made:
        made.call("join")
        started = time.monotonic()
        with pytest.raises(
            WorkerError, match="host rank 1, total_or_fail: ArithmeticError: the sum is wrong"
        ) as caught:
            made.call("total_or_fail", 1)
        assert time.monotonic() - started < 5
        assert (caught.value.group, caught.value.rank, caught.value.method) == ("host", 1, "total_or_fail")
        assert 'raise ArithmeticError("the sum is wrong")' in str(caught.value)
        assert wait_gone(made.process_ids) == []
        with pytest.raises(WorkerError, match="the sum is wrong"):
            made.call("hello")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_the_cause_not_its_peers_broken_connection(number):
    with group(2) as made:
        made.call("join")
        with pytest.raises(
            WorkerError, match=f"host rank 1, total_or_die: the process was killed by {number.name}"
        ) as caught:
            made.call("total_or_die", 1, int(number))
        assert caught.value.exit_code == -number
        assert "about to go away" in str(caught.value)


def test_a_worker_that_leaves_between_calls(tmp_path):
    with group(1, log_dir=tmp_path) as made, pytest.raises(WorkerError, match="exited with status 7"):
        made.call("leave", 7)
    assert "leaving early" in (tmp_path / "host-0.log").read_text()


def test_a_worker_killed_while_idle_fails_the_next_call():
    with group(2) as made:
        os.kill(made.process_ids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"rank 0, .*SIGKILL"):
            for _ in range(100):
                made.call("sleep", 0.05)


def test_failures_while_starting():
    with pytest.raises(WorkerError, match="host rank 1, setup: KeyError: 'no such part'"):
        WorkerGroup.start("host", "runtime_hosts:Host", {"fail_on": 1}, 2)
    with pytest.raises(WorkerError, match="has no 'Nothing'"):
        WorkerGroup.start("host", "runtime_hosts:Nothing", {}, 1)
    with pytest.raises(TimeoutError, match=r"host: setup has not finished after 4 s; waiting for ranks \[(0, )?1\]"):
        WorkerGroup.start("host", "runtime_hosts:Host", {"hang_on": 1}, 2, setup_timeout=4)


def test_calls_wait_in_line_behind_a_start_that_is_not_waited_for():
    started = time.monotonic()
    made = WorkerGroup.start("host", "runtime_hosts:Host", {}, 1, wait=False)
    assert time.monotonic() - started < 1.0  # the process still imports torch
    with made:
        pending = made.submit("hello")
        assert not pending.done() and pending.result(60)[0][0] == "hello"
    broken = WorkerGroup.start("host", "runtime_hosts:Host", {"fail_on": 0}, 1, wait=False)
    with pytest.raises(WorkerError, match="setup: KeyError"):
        broken.call("hello")
    broken.close()


def test_too_few_gpus_is_said_before_a_process_starts(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with pytest.raises(ValueError, match="needs GPUs 1 to 2, but CUDA_VISIBLE_DEVICES=3,5 has 2"):
        WorkerGroup.start("host", "runtime_hosts:Host", {}, 2, device="cuda", gpu_offset=1)


def test_stream_failure_and_unsendable_answer():
    with group(1) as made:
        items = made.stream("count_and_fail", 3)
        assert [next(items) for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
        with pytest.raises(WorkerError, match="OSError: the source ran dry"):
            next(items)
    with group(1) as made, pytest.raises(WorkerError, match="unsendable"):
        made.call("unsendable")


def test_diagnostics_keep_their_type():
    with group(1) as made, pytest.raises(DiagnosticError) as caught:
        made.call("refuse")
    assert [d.code for d in caught.value.diagnostics] == ["AL301"]
    assert "9 heads do not divide by 2" in str(caught.value)


def test_a_call_that_takes_too_long_ends_the_group():
    with group(1) as made:
        with pytest.raises(TimeoutError, match=r"sleep has not finished after 0\.5 s"):
            made.submit("sleep", 60).result(0.5)
        assert wait_gone(made.process_ids) == []


def test_close_of_a_busy_group_takes_what_it_started_along():
    made = WorkerGroup.start("host", "runtime_hosts:Host", {}, 1)
    child = made.call("child")[0]
    made.submit("sleep", 600)
    started = time.monotonic()
    made.close(grace=0.5)
    made.close()
    assert time.monotonic() - started < 3
    assert wait_gone([*made.process_ids, child]) == []


DRIVER = """
    import sys, time
    sys.path.insert(0, {here!r})
    from areal_like.runtime.local import WorkerGroup
    group = WorkerGroup.start("host", "runtime_hosts:Host", {{}}, 2)
    group.call("join")
    busy = group.submit("sleep", 600) if {busy} else None
    print(*group.process_ids, group._folder, flush=True)
    {then}
"""


def start_driver(tmp_path, busy=True, then="time.sleep(600)"):
    script = tmp_path / "driver.py"  # no `if __name__ == "__main__"` is needed
    script.write_text(textwrap.dedent(DRIVER.format(here=HERE, busy=busy, then=then)))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets what it starts in the background ignore Ctrl-C, and so would this child of the tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    words = process.stdout.readline().split()
    assert len(words) == 3, process.stderr.read()
    return process, [int(word) for word in words[:2]], Path(words[2])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_driver_that_is_killed_leaves_no_process(tmp_path, number):
    process, pids, folder = start_driver(tmp_path)
    process.send_signal(number)
    process.wait(timeout=5)
    assert wait_gone(pids) == []
    if number == signal.SIGINT:
        assert not folder.exists()


@pytest.mark.parametrize("then", ["pass", "1 / 0"])
def test_a_driver_that_ends_without_close_leaves_nothing(tmp_path, then):
    process, pids, folder = start_driver(tmp_path, then=then)
    process.wait(timeout=10)
    assert wait_gone(pids) == []
    assert not folder.exists()


def test_a_group_outlives_the_thread_that_started_it():
    import threading

    made = []
    thread = threading.Thread(target=lambda: made.append(WorkerGroup.start("host", "runtime_hosts:Host", {}, 1)))
    thread.start()
    thread.join()
    time.sleep(0.3)
    with made[0] as started:
        assert started.call("hello")[0][0] == "hello"


def test_an_independent_rank_dies_alone_and_is_started_again(tmp_path):
    with group(3, greeting="hi", independent=True, log_dir=tmp_path) as made:
        waiting = made.submit("until_interrupted")
        os.kill(made.process_ids[1], signal.SIGKILL)
        died = r"host rank 1, until_interrupted: the process was killed by SIGKILL"
        with pytest.raises(WorkerError, match=died) as caught:
            made.submit_one(1, "hello").result(30)
        assert caught.value.exit_code == -signal.SIGKILL and made.is_dead(1) and not made.is_dead(0)
        assert not waiting.done()  # the others are still at it
        made.interrupt()
        with pytest.raises(WorkerError, match="rank 1"):
            waiting.result(30)
        made.clear_interrupt()
        with pytest.raises(WorkerError, match="rank 1"):
            made.submit_one(1, "hello")
        assert made.submit_to([0, 2], "hello", 4).result(30) == [("hi", 0, (4,), {}), ("hi", 2, (4,), {})]
        before = made.process_ids
        with pytest.raises(RuntimeError, match="host rank 0 is not dead"):
            made.restart(0)
        made.restart(1).result(30)
        assert made.call("hello") == [("hi", rank, (), {}) for rank in range(3)]
        assert [a == b for a, b in zip(before, made.process_ids, strict=True)] == [True, False, True]
        with pytest.raises(WorkerError, match="exited with status 3"):
            made.submit_one(1, "leave", 3).result(30)
        assert "leaving early" in (tmp_path / "host-1.1.log").read_text() and (tmp_path / "host-1.log").exists()
        made.restart(1).result(30)
        assert len(made.call("hello")) == 3
        pids = made.process_ids
    assert wait_gone(pids) == []


def test_an_exception_in_an_independent_rank_ends_the_group():
    with group(2, independent=True) as made:
        with pytest.raises(WorkerError, match="ArithmeticError"):
            made.submit_one(0, "total_or_fail", 0).result(30)
        with pytest.raises(WorkerError):
            made.submit_one(1, "hello")


def test_one_rank_is_interrupted_alone():
    with group(2) as made:
        calls = [made.submit_one(rank, "until_interrupted") for rank in range(2)]
        made.interrupt(1)
        assert calls[1].result(30) == ["interrupted"] and not calls[0].done()
        made.clear_interrupt(1)
        made.interrupt()
        assert calls[0].result(30) == ["interrupted"]
        made.clear_interrupt()
