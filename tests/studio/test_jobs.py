"""The worker: one thread owns the device, jobs queue, stop within a step, and short calls slip in between."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from headscope.engine.base.errors import HeadscopeError, PromptError
from headscope.studio.base.errors import Busy
from headscope.studio.lab import jobs
from headscope.studio.lab.jobs import Context, Worker, sentence


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def stepping(started: threading.Event, seen: list[int], steps: int = 400) -> object:
    def work(context: Context) -> str:
        for step in range(steps):
            context.step(step, steps, f"layer {step}")
            seen.append(step)
            started.set()
            time.sleep(0.005)
        return "finished"

    return work


def test_a_job_reports_progress_and_its_result(worker: Worker) -> None:
    job = worker.submit("a", "run", "Run", stepping(threading.Event(), [], 5))
    assert job.finished.wait(5)
    assert (job.state, job.result, job.done, job.total) == ("done", "finished", 4, 5)
    assert worker.latest("a") is job and worker.job(job.id) is job


def test_all_work_runs_on_the_one_thread_in_order(worker: Worker) -> None:
    names: list[tuple[str, str]] = []

    def work(context: Context) -> None:
        names.append((threading.current_thread().name, "job"))

    submitted = [worker.submit(f"session {index}", "run", "Run", work) for index in range(5)]
    assert all(job.finished.wait(5) for job in submitted)
    assert worker.quick(lambda: threading.current_thread().name) == "headscope-device"
    assert names == [("headscope-device", "job")] * 5


def test_cancel_stops_within_one_step_and_keeps_nothing(worker: Worker) -> None:
    started, seen = threading.Event(), []
    job = worker.submit("a", "run", "Run", stepping(started, seen))
    assert started.wait(5)
    job.cancel()
    at = len(seen)
    assert job.finished.wait(5)
    assert len(seen) - at <= 1
    assert (job.state, job.result, job.error) == ("cancelled", None, "")


def test_a_cancelled_job_that_waits_never_starts(worker: Worker) -> None:
    started, ran = threading.Event(), []
    first = worker.submit("a", "run", "Run", stepping(started, []))
    second = worker.submit("b", "run", "Run", lambda context: ran.append(1))
    assert started.wait(5)
    assert worker.position(second) == 1 and worker.position(first) == 0
    second.cancel()
    first.cancel()
    assert second.finished.wait(5)
    assert second.state == "cancelled" and not ran


def test_a_session_has_one_job_at_a_time(worker: Worker) -> None:
    started = threading.Event()
    job = worker.submit("a", "run", "Run", stepping(started, []))
    with pytest.raises(Busy, match="already has a run"):
        worker.submit("a", "run", "Run", stepping(started, []))
    job.cancel()
    assert job.finished.wait(5)
    assert worker.submit("a", "run", "Run", lambda context: 1).finished.wait(5)


def test_short_calls_run_between_the_layers_of_a_long_job(worker: Worker) -> None:
    started, seen = threading.Event(), []
    job = worker.submit("a", "run", "Run", stepping(started, seen))
    assert started.wait(5)
    assert worker.quick(lambda: 40 + 2, timeout=2) == 42
    assert job.open, "the short call had to wait for the whole job"
    job.cancel()


def test_a_short_call_raises_what_its_work_raised(worker: Worker) -> None:
    def fail() -> None:
        raise PromptError("too long")

    with pytest.raises(PromptError, match="too long"):
        worker.quick(fail)


def test_a_short_call_gives_up_in_time_and_is_then_not_run(worker: Worker) -> None:
    release, started, ran = threading.Event(), threading.Event(), []

    def block(context: Context) -> None:
        started.set()
        release.wait(5)

    job = worker.submit("a", "run", "Run", block)
    assert started.wait(5)
    with pytest.raises(Busy, match="busy"):
        worker.quick(lambda: ran.append(1), timeout=0.1)
    release.set()
    assert job.finished.wait(5)
    worker.quick(lambda: None)
    assert not ran


def test_a_failure_is_one_sentence_without_the_prompt(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    secret = "the prompt says: my password is hunter2"

    def fail(context: Context) -> None:
        raise KeyError(secret)

    with caplog.at_level(logging.DEBUG):
        job = worker.submit("a", "run", "Run", fail)
        assert job.finished.wait(5)
    assert job.state == "failed"
    assert "KeyError" in job.error and "nothing was lost" in job.error
    assert "hunter2" not in job.error + caplog.text
    assert worker.submit("a", "run", "Run", lambda context: 1).finished.wait(5), "the worker survives a failure"


class Panic(BaseException):
    """As a library written in Rust raises it: no Exception."""


def test_a_panic_ends_the_job_or_the_call_and_the_worker_goes_on(worker: Worker) -> None:
    def panic(*_: object) -> None:
        raise Panic("called `Option::unwrap()` on a `None` value")

    job = worker.submit("a", "run", "Run", panic)
    assert job.finished.wait(5)
    assert job.state == "failed" and "Panic" in job.error and "unwrap" not in job.error
    with pytest.raises(HeadscopeError, match="Panic"):
        worker.quick(panic, timeout=5)
    assert worker.submit("b", "run", "Run", lambda context: 1).finished.wait(5)
    assert worker.quick(lambda: 42, timeout=5) == 42


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_if_the_thread_ends_its_job_fails_with_a_sentence_and_another_takes_over(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fatal(error: BaseException) -> str:
        raise Panic("while the sentence was being made")

    def fail(context: Context) -> None:
        raise KeyError("x")

    started, release = threading.Event(), threading.Event()

    def first(context: Context) -> None:
        started.set()
        release.wait(5)
        fail(context)

    job = worker.submit("a", "run", "Run", first)
    assert started.wait(5)
    waiting = worker.submit("b", "run", "Run", lambda context: 7)
    ended = worker._thread
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "sentence", fatal)
        release.set()
        assert job.finished.wait(5)
    assert job.state == "failed" and "thread ended" in job.error
    assert waiting.finished.wait(5) and waiting.result == 7
    assert worker._thread is not ended and worker.quick(lambda: 42, timeout=5) == 42
    ended.join(5)
    assert not ended.is_alive()


def test_the_clock_of_a_job_leaves_out_the_short_calls_of_others(worker: Worker) -> None:
    started, queued, times = threading.Event(), threading.Event(), dict[str, float]()

    def work(context: Context) -> None:
        began, own = time.perf_counter(), context.clock()
        started.set()
        assert queued.wait(5)
        time.sleep(0.02)
        context.step(1, 2, "layer 1")
        times["all"], times["own"] = time.perf_counter() - began, context.clock() - own

    job = worker.submit("a", "run", "Run", work)
    assert started.wait(5)
    thread = threading.Thread(target=lambda: worker.quick(lambda: time.sleep(0.3)))
    thread.start()
    while worker._quick.empty():
        time.sleep(0.001)
    queued.set()
    assert job.finished.wait(5), job.error
    thread.join()
    assert times["all"] >= 0.3 > times["own"] + 0.05


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PromptError("The prompt is empty."), "The prompt is empty."),
        (MemoryError(), "not enough memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "not enough memory"),
        (OSError(28, "No space left on device"), "disk is full"),
    ],
)
def test_known_failures_have_their_sentence(error: Exception, words: str) -> None:
    assert words in sentence(error)


def test_many_sessions_submit_at_once(worker: Worker) -> None:
    submitted = []

    def submit(name: str) -> None:
        submitted.append(worker.submit(name, "run", "Run", lambda context: name))

    threads = [threading.Thread(target=submit, args=(f"s{index}",)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(job.finished.wait(5) for job in submitted)
    assert sorted(job.result for job in submitted) == sorted(f"s{index}" for index in range(16))
