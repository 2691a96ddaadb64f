"""The compile service against tasks that hang, devour memory, crash, and misbehave otherwise."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grammar_host.errors import (
    CompileCrashError,
    CompileServiceError,
    CompileTimeoutError,
    GrammarTooComplexError,
    UnsupportedGuideError,
)
from grammar_host.service import CompileService
from grammar_host.service.protocol import MAX_REPLY_BYTES
from tests.grammar_host.hostile_task import LONG, MEBIBYTE, MEMORY_LIMIT

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "tests.grammar_host.hostile_task"


def new_service(
    *,
    task_factory: str = f"{HOSTILE}:make_task",
    payload: Any = "payload",
    timeout_s: float = LONG,
    memory_limit_bytes: int = MEMORY_LIMIT,
    workers: int = 1,
) -> CompileService:
    return CompileService(
        task_factory,
        payload,
        timeout_s=timeout_s,
        memory_limit_bytes=memory_limit_bytes,
        workers=workers,
    )


def call(service: CompileService, *args: Any) -> Any:
    return service.submit(*args, param="regex").result(LONG)


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def children() -> set[int]:
    """Processes whose parent is this one, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


@pytest.fixture(scope="module")
def service() -> Iterator[CompileService]:
    """Two workers without a deadline that these tests could meet."""
    with new_service(workers=2) as service:
        yield service


@pytest.fixture(scope="module")
def hasty() -> Iterator[CompileService]:
    with new_service(workers=2, timeout_s=1.0) as service:
        yield service


class TestOutcomes:
    def test_results_and_arguments_travel(self, service):
        value = {"text": "é\0😀", "bytes": b"\x00\xff", "none": None}
        assert call(service, "echo", value) == value

    def test_the_task_is_made_once_and_shared(self, service):
        first, second = call(service, "describe"), call(service, "describe")
        assert first["payload"] == "payload"
        assert first["made_in"] == second["made_in"]
        assert first["made_in"] not in (first["worker"], os.getpid())

    def test_workers_are_set_up(self, service):
        state = call(service, "describe")
        assert state["cores"] == (0, 0)
        assert state["threads"] == 1  # where it was forked from
        assert state["stdin"] == b""

    def test_guide_errors_arrive_as_they_were_raised(self, service):
        with pytest.raises(UnsupportedGuideError) as caught:
            call(service, "refuse")
        error = caught.value
        assert (error.param, error.reason) == ("schema", "no such keyword")
        assert (error.pointer, error.code) == ("/not", "special")
        assert not hasattr(error, "__notes__")

    def test_unexpected_exceptions_bring_their_traceback_along(self, service):
        with pytest.raises(KeyError, match="a bug") as caught:
            call(service, "raise_unexpectedly")
        assert "in raise_unexpectedly" in "".join(caught.value.__notes__)

    @pytest.mark.parametrize(
        ("action", "reason"),
        [
            ("raise_one_way", "raised OneWayError"),
            ("raise_unpicklable", "raised RuntimeError"),
            ("return_unpicklable", "returned lock"),
        ],
    )
    def test_what_cannot_be_pickled_is_reported(self, service, action, reason):
        with pytest.raises(CompileServiceError, match=reason):
            call(service, action)

    def test_arguments_that_cannot_be_pickled_are_refused_at_once(self, service):
        with pytest.raises(TypeError, match="pickle"):
            service.submit(threading.Lock(), param="regex")

    def test_large_results(self, service):
        assert call(service, "return_bytes", 20 * MEBIBYTE) == b"x" * (20 * MEBIBYTE)

    def test_a_result_that_would_burden_the_parent_is_refused(self, service):
        with pytest.raises(GrammarTooComplexError, match="64 MiB") as caught:
            call(service, "return_bytes", MAX_REPLY_BYTES + 1)
        assert caught.value.param == "regex"

    def test_large_arguments(self, service):
        text = "x" * MEBIBYTE
        assert call(service, "echo", text) == text

    def test_printing_and_reading_do_not_disturb(self, service):
        assert call(service, "print_a_lot") == "done"
        assert call(service, "read_standard_input") == ""


MEMORY = ["devour", "devour_at_once", "devour_and_translate", "devour_like_cpp", "devour_like_rust"]
CRASHES = [
    (("signal_itself", signal.SIGSEGV), "SIGSEGV"),
    (("signal_itself", signal.SIGABRT), "SIGABRT"),
    (("write_to_address_zero",), "SIGSEGV"),
    (("exit_at_once",), "exit code 3"),
    (("leave_politely",), "exit code 1"),
]


class TestHostileJobs:
    @pytest.mark.parametrize(
        "action",
        [("sleep", LONG), ("sleep_uninterruptibly",), ("match_catastrophically",)],
        ids=lambda action: action[0],
    )
    def test_the_deadline_ends_a_job(self, hasty, action):
        with pytest.raises(CompileTimeoutError, match=r"^regex: .* 1 s ") as caught:
            call(hasty, *action)
        assert caught.value.code == "grammar_compile_timeout"
        assert call(hasty, "echo", 1) == 1

    def test_a_stopped_worker_is_gone_before_callbacks_run(self):
        with new_service(timeout_s=1.0) as service:
            worker = call(service, "describe")["worker"]
            gone = threading.Event()

            def wait_for_end(job: Any) -> None:
                wait_until(lambda: not is_running(worker))
                gone.set()

            service.submit("match_catastrophically", param="regex").add_done_callback(wait_for_end)
            assert gone.wait(LONG)

    @pytest.mark.parametrize("action", MEMORY)
    def test_the_memory_limit_ends_a_job(self, service, action):
        with pytest.raises(GrammarTooComplexError, match="more than 200 MiB") as caught:
            call(service, action)
        assert caught.value.param == "regex"
        assert call(service, "echo", 1) == 1

    def test_being_killed_means_out_of_memory(self, service):
        with pytest.raises(GrammarTooComplexError, match="memory"):
            call(service, "signal_itself", signal.SIGKILL)
        assert call(service, "echo", 1) == 1

    @pytest.mark.parametrize(("action", "reason"), CRASHES)
    def test_a_crash_ends_only_its_own_job(self, service, action, reason):
        with pytest.raises(CompileCrashError, match=re.escape(reason)) as caught:
            call(service, *action)
        assert caught.value.param == "regex"
        assert call(service, "echo", 1) == 1

    def test_a_worker_that_hangs_up_is_ended(self, service):
        with pytest.raises((CompileCrashError, GrammarTooComplexError)):
            call(service, "hang_up")
        assert call(service, "echo", 1) == 1

    @pytest.mark.parametrize(
        "action", [("devour",), ("exit_at_once",), ("signal_itself", signal.SIGSEGV)]
    )
    def test_the_other_worker_is_not_disturbed(self, service, action):
        other = service.submit("sleep", 0.4, param="regex")
        wait_until(lambda: service.stats().running == 1)
        with pytest.raises((CompileCrashError, GrammarTooComplexError)):
            call(service, *action)
        assert other.result(LONG) is None

    def test_the_deadline_does_not_disturb_the_other_worker(self):
        with new_service(workers=2, timeout_s=1.5) as service:
            call(service, "echo", 1)
            slow = service.submit("sleep", LONG, param="regex")
            time.sleep(1.0)
            other = service.submit("sleep", 1.0, param="regex")
            with pytest.raises(CompileTimeoutError):
                slow.result(LONG)
            assert not other.done()
            assert other.result(LONG) is None

    def test_what_earlier_jobs_left_behind_does_not_count(self):
        with new_service() as service:
            worker = call(service, "describe")["worker"]
            call(service, "keep", 90)
            assert call(service, "describe")["worker"] == worker
            call(service, "keep", 180)  # more than the limit together
            # Too large by now: replaced by one that has kept nothing.
            assert call(service, "describe")["worker"] != worker
            assert service.stats().restarts == 1

    def test_waiting_does_not_count(self):
        with new_service(timeout_s=1.5) as service:
            jobs = [service.submit("sleep", 0.4, param="regex") for _ in range(4)]
            for job in jobs:
                job.result(LONG)
            assert jobs[3].waiting_seconds > 1.1
            assert 0.4 <= jobs[3].running_seconds < jobs[3].waiting_seconds


class TestQueue:
    def test_many_threads(self, service):
        with ThreadPoolExecutor(8) as executor:
            results = list(executor.map(lambda value: call(service, "echo", value), range(50)))
        assert results == list(range(50))

    def test_counters(self):
        with new_service(workers=2) as service:
            assert service.stats().jobs == 0
            sleepers = [
                service.submit("sleep", 0.5, param="regex", label=label) for label in ("one", "two")
            ]
            waiting = service.submit("echo", 1, param="regex")
            dropped = service.submit("echo", 1, param="regex")
            assert dropped.cancel()
            wait_until(lambda: service.stats().running == 2)
            assert service.stats().queued == 2
            assert {job.label for job in service.running()} == {"one", "two"}
            assert all(0 <= job.seconds < LONG for job in service.running())
            for job in [*sleepers, waiting]:
                job.result(LONG)
            with pytest.raises(CancelledError):
                dropped.result(LONG)
            for action in ("refuse", "devour", "exit_at_once", "return_unpicklable"):
                assert service.submit(action, param="regex").exception(LONG) is not None
            stats = service.stats()
            assert service.running() == []
        assert (stats.jobs, stats.succeeded, stats.cancelled) == (8, 3, 1)
        assert (stats.refused, stats.out_of_memory, stats.crashed, stats.failed) == (1, 1, 1, 1)
        assert (stats.timed_out, stats.queued, stats.running) == (0, 0, 0)
        assert stats.running_seconds >= 1.0
        assert stats.waiting_seconds >= 0.5

    def test_timeouts_and_restarts_are_counted(self, hasty):
        before = hasty.stats()
        with pytest.raises(CompileTimeoutError):
            call(hasty, "sleep", LONG)
        wait_until(lambda: hasty.stats().restarts == before.restarts + 1)
        assert hasty.stats().timed_out == before.timed_out + 1


class TestPreloading:
    def test_happens_once_where_workers_are_forked(self):
        with new_service(workers=2, timeout_s=1.0) as service:
            before = call(service, "describe")
            service.preload("engine")
            service.preload("engine")
            service.preload("broken")
            assert before["preloaded"] == []
            after = call(service, "describe")
            assert after["preloaded"] == [("engine", before["made_in"])]
            with pytest.raises(CompileTimeoutError):
                call(service, "sleep", LONG)
            assert call(service, "describe")["preloaded"] == [("engine", before["made_in"])]

    def test_does_not_delay_a_deadline(self):
        with new_service(workers=2, timeout_s=1.0) as service:
            call(service, "echo", 1)
            slow = service.submit("sleep", LONG, param="regex")
            wait_until(lambda: service.stats().running == 1)
            service.preload("3")
            other = service.submit("echo", 1, param="regex")
            with pytest.raises(CompileTimeoutError):
                slow.result(LONG)
            assert not other.done()
            assert other.result(LONG) == 1  # the preload took longer than the deadline

    def test_does_not_keep_a_service_from_closing(self):
        before = children()
        service = new_service()
        call(service, "echo", 1)
        service.preload(f"{LONG:.0f}")
        job = service.submit("echo", 1, param="regex")
        time.sleep(0.5)  # until the preload has begun
        started = time.monotonic()
        service.close()
        assert time.monotonic() - started < LONG / 2
        assert isinstance(job.exception(LONG), CompileServiceError)
        assert children() == before


class TestLifeCycle:
    def test_closing_ends_everything(self):
        descriptors = len(os.listdir("/proc/self/fd"))
        before, threads = children(), threading.active_count()
        service = new_service(workers=2)
        pids = [call(service, "describe")["worker"], call(service, "describe")["made_in"]]
        with pytest.raises(CompileCrashError):
            call(service, "exit_at_once")
        running = [service.submit("sleep", LONG, param="regex") for _ in range(2)]
        waiting = service.submit("echo", 1, param="regex")
        wait_until(lambda: service.stats().running == 2)
        service.close()
        for job in [*running, waiting]:
            with pytest.raises(CompileServiceError):
                job.result(LONG)
        assert not any(map(is_running, pids))
        assert children() == before
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == descriptors
        with pytest.raises(CompileServiceError, match="closed"):
            service.submit("echo", 1, param="regex")
        with pytest.raises(CompileServiceError, match="closed"):
            service.start()
        service.close()

    def test_restarts_leak_no_descriptors(self):
        with new_service() as service:
            call(service, "echo", 1)
            gc.collect()
            descriptors = len(os.listdir("/proc/self/fd"))
            for _ in range(20):
                with pytest.raises(CompileCrashError):
                    call(service, "exit_at_once")
            call(service, "echo", 1)
            assert len(os.listdir("/proc/self/fd")) <= descriptors

    def test_closing_what_never_started(self):
        before = children()
        with new_service() as service:
            pass
        assert children() == before
        assert service.stats().restarts == 0

    def test_closing_while_the_workers_start(self):
        before = children()
        service = new_service()
        job = service.submit("echo", 1, param="regex")
        service.close()
        with pytest.raises(CompileServiceError):
            job.result(LONG)
        assert children() == before

    def test_starting_early_does_not_wait_but_works(self):
        with new_service() as service:
            service.start()
            service.start()
            assert call(service, "echo", 1) == 1

    def test_a_forgotten_service_is_collected(self):
        before = children()
        service = new_service()
        call(service, "echo", 1)
        assert children() != before
        del service
        gc.collect()
        wait_until(lambda: children() == before)

    def test_a_job_keeps_its_service(self):
        job = new_service().submit("echo", 1, param="regex")
        gc.collect()
        assert job.result(LONG) == 1

    def test_a_done_callback_may_close_the_service(self):
        service = new_service()
        closed = threading.Event()

        def close(job: Any) -> None:
            service.close()
            closed.set()

        service.submit("sleep", 0.1, param="regex").add_done_callback(close)
        assert closed.wait(LONG)

    @pytest.mark.parametrize("victim", ["worker", "made_in"])
    def test_a_process_killed_while_idle_is_replaced(self, victim):
        with new_service() as service:
            state = call(service, "describe")
            os.kill(state[victim], signal.SIGKILL)
            wait_until(lambda: not is_running(state["worker"]))
            assert call(service, "describe")[victim] != state[victim]

    def test_a_job_outlives_its_zygote_once(self):
        with new_service(workers=2) as service:
            state = call(service, "describe")
            jobs = [service.submit("sleep", 0.5, param="regex") for _ in range(2)]
            wait_until(lambda: service.stats().running == 2)
            os.kill(state["made_in"], signal.SIGKILL)
            assert [job.result(LONG) for job in jobs] == [None, None]
            assert not is_running(state["worker"])
            stats = service.stats()
            assert (stats.jobs, stats.succeeded, stats.failed, stats.queued) == (3, 3, 0, 0)

    def test_a_job_does_not_outlive_its_zygote_twice(self):
        before = children()
        with new_service() as service:
            call(service, "echo", 1)
            job = service.submit("sleep", LONG, param="regex")
            killed: set[int] = set()
            for _ in range(2):
                wait_until(lambda: service.stats().running == 1 and children() - before - killed)
                (zygote,) = children() - before - killed
                os.kill(zygote, signal.SIGKILL)
                killed.add(zygote)
                wait_until(lambda: job.done() or service.stats().running == 0)
            with pytest.raises(CompileServiceError, match="stopped"):
                job.result(LONG)
            assert call(service, "echo", 1) == 1
            stats = service.stats()
            assert (stats.jobs, stats.succeeded, stats.failed, stats.queued) == (3, 2, 1, 0)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals_to_the_whole_group_are_the_parents_business(self, service, number):
        state = call(service, "describe")
        running = service.submit("sleep", 0.3, param="regex")
        os.killpg(state["made_in"], number)
        assert running.result(LONG) is None
        assert call(service, "describe")["made_in"] == state["made_in"]

    def test_the_end_of_the_interpreter_ends_everything(self):
        program = f"""
            import time
            from tests.grammar_host.test_service import call, new_service
            service = new_service()
            print(call(service, "describe")["made_in"])
            service.preload("{LONG:.0f}")
            service.submit("echo", 1, param="regex")
            time.sleep(0.5)
        """
        result = run_program(program)
        assert result.stderr == ""
        assert not is_running(int(result.stdout))

    def test_a_forked_copy_refuses_and_does_no_harm(self):
        # Forking under JAX's threads warns; a process without JAX stands in for the caller.
        program = """
            import os, sys
            from tests.grammar_host.test_service import CompileServiceError, call, new_service
            service = new_service()
            zygote = call(service, "describe")["made_in"]
            pid = os.fork()
            if pid == 0:
                try:
                    service.submit("echo", 1, param="regex")
                except CompileServiceError as error:
                    assert "forked" in str(error)
                    service.close()
                    os._exit(5)
                os._exit(6)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
            print(call(service, "describe")["made_in"] == zygote)
        """
        assert run_program(program, "-W", "ignore").stdout == "True\n"


def run_program(
    program: str, *options: str, path: str = str(ROOT), **arguments: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=2 * LONG,
        env={**os.environ, "PYTHONPATH": path},
        **arguments,
    )


class TestSurroundings:
    def test_a_killed_parent_leaves_nothing_behind(self):
        program = f"""
            import time
            from tests.grammar_host.test_service import call, new_service
            service = new_service(workers=2)
            state = call(service, "describe")
            service.submit("match_catastrophically", param="regex")
            service.submit("match_catastrophically", param="regex")
            while service.stats().running < 2:
                time.sleep(0.01)
            print(state["made_in"], state["worker"], flush=True)
            time.sleep({LONG})
        """
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        with process:
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert len(pids) == 2
            assert all(map(is_running, pids))
            process.kill()
        wait_until(lambda: not any(map(is_running, pids)))

    def test_a_script_without_main_guard_in_a_checkout(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent(f"""
                import sys
                print("run once")
                sys.path.insert(0, {str(ROOT)!r})
                from grammar_host.service import CompileService
                service = CompileService(
                    "mytask:make", 20, timeout_s=30, memory_limit_bytes=10**8
                )
                print(service.submit(1, param="regex").result())
            """)
        )
        (tmp_path / "mytask.py").write_text("def make(x):\n    return lambda y: x + y\n")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # A module of the working directory that no program asked for must not be taken.
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "numpy.py").write_text("raise SystemExit('shadowed')")
        result = subprocess.run(
            [sys.executable, "-W", "error", str(script)],
            capture_output=True,
            text=True,
            timeout=2 * LONG,
            env=environment,
            cwd=elsewhere,
        )
        assert (result.stdout, result.stderr) == ("run once\n21\n", "")

    def test_a_package_that_is_no_longer_on_the_path(self, monkeypatch, tmp_path):
        # It was found through a relative entry, from another directory.
        monkeypatch.chdir(tmp_path)
        elsewhere = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]
        monkeypatch.setattr(sys, "path", ["", *elsewhere])
        with new_service() as service:
            path = call(service, "describe")["path"].split(os.pathsep)
        assert path[0] == str(tmp_path)
        assert path[-1] == str(ROOT)

    def test_nothing_is_left_to_whoever_adopts_orphans(self):
        # As the first process of a container does.
        program = """
            import ctypes, os
            from tests.grammar_host.test_service import call, children, new_service
            PR_SET_CHILD_SUBREAPER = 36
            assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
            with new_service(workers=2) as service:
                call(service, "echo", 1)
            print(children())
        """
        assert run_program(program).stdout == "set()\n"

    def test_closed_standard_streams(self, tmp_path):
        output = tmp_path / "output"
        program = f"""
            import os
            os.closerange(0, 3)
            from tests.grammar_host.test_service import call, new_service
            with new_service(workers=2) as service:
                value = call(service, "echo", "fine")
                call(service, "print_a_lot")
            with open({str(output)!r}, "w") as file:
                file.write(value)
        """
        run_program(program)
        assert output.read_text() == "fine"

    def test_warnings_as_errors_in_the_environment(self, monkeypatch):
        monkeypatch.setenv("PYTHONWARNINGS", "error")
        with new_service() as service:
            call(service, "warn")

    def test_the_log(self, monkeypatch, tmp_path):
        log = tmp_path / "log"
        monkeypatch.setenv("GRAMMAR_HOST_WORKER_LOG", str(log))
        with new_service() as service:
            call(service, "print_a_lot")
            with pytest.raises(CompileCrashError):
                call(service, "write_to_address_zero")
        text = log.read_text()
        assert "xxx" in text
        assert "yyy" in text
        assert "in write_to_address_zero" in text


class TestFailureToStart:
    def test_a_factory_that_raises(self):
        before = children()
        with new_service(task_factory=f"{HOSTILE}:fail_to_make") as service:
            for _ in range(2):
                with pytest.raises(CompileServiceError, match=r"ImportError: nothing for payload"):
                    call(service, "echo", 1)
            assert service.stats().failed == 2
        assert children() == before

    @pytest.mark.parametrize(
        ("module", "reason"), [("no.such.module:task", "ModuleNotFound"), ("os:no", "Attribute")]
    )
    def test_a_factory_that_is_not_there(self, module, reason):
        with (
            new_service(task_factory=module) as service,
            pytest.raises(CompileServiceError, match=f'{reason}.*isolation="none"'),
        ):
            call(service, "echo", 1)

    def test_a_factory_that_ends_the_process(self):
        with (
            new_service(task_factory=f"{HOSTILE}:end_instead_of_making") as service,
            pytest.raises(CompileServiceError, match=r"GRAMMAR_HOST_WORKER_LOG"),
        ):
            call(service, "echo", 1)

    @pytest.mark.parametrize("executable", ["/no/such/python", "", None, "/bin/true"])
    def test_no_interpreter(self, monkeypatch, executable):
        monkeypatch.setattr(sys, "executable", executable)
        with (
            new_service() as service,
            pytest.raises(CompileServiceError, match=r'cannot start.*isolation="none"'),
        ):
            call(service, "echo", 1)

    def test_a_frozen_program_is_not_run_again(self, monkeypatch):
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        with new_service() as service, pytest.raises(CompileServiceError, match="interpreter"):
            call(service, "echo", 1)

    def test_a_fork_that_fails_disturbs_nobody(self):
        program = """
            import os, resource, time
            from tests.grammar_host.test_service import CompileServiceError, call, new_service
            with new_service(workers=2) as service:
                call(service, "echo", 1)
                zygote = call(service, "describe")["made_in"]
                running = service.submit("sleep", 1.0, param="regex")
                while not service.running():
                    time.sleep(0.01)
                _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
                assert service.submit("exit_at_once", param="regex").exception(30) is not None
                failure = service.submit("echo", 1, param="regex").exception(30)
                assert isinstance(failure, CompileServiceError), failure
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                assert running.result(30) is None
                print(call(service, "describe")["made_in"] == zygote)
        """
        assert run_program(program).stdout == "True\n"

    def test_it_recovers_when_the_reason_is_gone(self, monkeypatch):
        with new_service() as service:
            with monkeypatch.context() as context:
                context.setattr(sys, "executable", "/no/such/python")
                with pytest.raises(CompileServiceError):
                    call(service, "echo", 1)
            assert call(service, "echo", 1) == 1

    @pytest.mark.parametrize(
        "change",
        [
            {"task_factory": "nothing"},
            {"task_factory": "a:b:c"},
            {"timeout_s": 0.0},
            {"timeout_s": float("nan")},
            {"memory_limit_bytes": 0},
            {"workers": 0},
        ],
    )
    def test_arguments_are_checked(self, change):
        with pytest.raises(ValueError, match=next(iter(change))):
            new_service(**change)


class TestWithoutFork:
    """Where `os.fork` is missing, every worker is an interpreter of its own."""

    @pytest.fixture
    def make(self, monkeypatch):
        monkeypatch.delattr(os, "fork")
        return partial(new_service, timeout_s=2.0)

    def test_the_same_interface(self, make):
        before, descriptors = children(), len(os.listdir("/proc/self/fd"))
        with make() as service:
            state = call(service, "describe")
            assert state["made_in"] == state["worker"]
            service.preload("engine")
            state = call(service, "describe")
            assert state["preloaded"] == [("engine", state["worker"])]
            with pytest.raises(GrammarTooComplexError):
                call(service, "devour")
            with pytest.raises(CompileCrashError, match="exit code 3"):
                call(service, "exit_at_once")
            with pytest.raises(CompileTimeoutError):
                call(service, "match_catastrophically")
            assert call(service, "echo", 1) == 1
            job = service.submit("sleep", LONG, param="regex")
            wait_until(lambda: service.stats().running == 1)
        with pytest.raises(CompileServiceError):
            job.result(LONG)
        assert children() == before
        assert len(os.listdir("/proc/self/fd")) == descriptors

    def test_a_factory_that_raises(self, make):
        with (
            make(task_factory=f"{HOSTILE}:fail_to_make") as service,
            pytest.raises(CompileServiceError, match="ImportError"),
        ):
            call(service, "echo", 1)
