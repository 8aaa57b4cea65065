"""One worker thread owns the device; pages submit, poll and cancel.

A `Job` is long work of one session (a run, a comparison); a session has at most one. Short calls (one head
measured again) go through `Worker.quick`: they run on the same thread, between the layers of whatever long job
is under way, so that tuning stays quick while somebody else's prompt runs. Nothing here knows streamlit.

The thread outlives whatever the work raises, even what is not an `Exception` (a panic in a library written in Rust). If
it ends all the same, the work at hand fails with a sentence and another thread goes on with the queue.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headscope.engine.base.errors import HeadscopeError
from headscope.studio.base.errors import Busy, Cancelled

log = logging.getLogger(__name__)

T = TypeVar("T")

ENDED = "The device's thread ended in the middle of the work: nothing was lost, you can run it again."

KEPT_JOBS = 64
"""Finished jobs that stay in memory."""


@dataclass
class Job:
    """Long work and how far it is. `state`: queued, running, done, failed or cancelled."""

    owner: str
    kind: str
    title: str
    work: Callable[[Context], Any] = field(repr=False)
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    state: str = "queued"
    done: int = 0
    total: int = 0
    words: str = ""
    result: Any = field(default=None, repr=False)
    error: str = ""
    warning: str = ""
    started: float = 0.0
    ended: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event, repr=False)
    finished: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def open(self) -> bool:
        """Waiting or at work."""
        return self.state in ("queued", "running")

    @property
    def share(self) -> float:
        """How much is done, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def seconds(self) -> float:
        """Time at work so far."""
        return (self.ended or time.monotonic()) - self.started if self.started else 0.0

    def cancel(self) -> None:
        """Asks the work to stop; it does so at its next step."""
        self.stop.set()


class Context:
    """What work gets to report through, and where it learns that it should stop."""

    def __init__(self, worker: Worker, job: Job) -> None:
        self._worker = worker
        self._job = job
        self._away = 0.0

    def clock(self) -> float:
        """Seconds that only this work takes: other sessions' short calls, served in between, are left out."""
        return time.perf_counter() - self._away

    def step(self, done: int, total: int, words: str) -> None:
        """Reports progress, serves waiting short calls, and raises `Cancelled` if the person asked to stop."""
        self.report(done, total, words)
        left = time.perf_counter()
        self._worker.serve_quick()
        self._away += time.perf_counter() - left
        self.check()

    def report(self, done: int, total: int, words: str) -> None:
        """`step` without serving short calls: for what is being timed."""
        self._job.done, self._job.total, self._job.words = done, total, words
        self.check()

    def say(self, words: str) -> None:
        """Changes the words alone."""
        self._job.words = words
        self.check()

    def warn(self, words: str) -> None:
        """Something that the person must know although the work went on."""
        self._job.warning = words

    def check(self) -> None:
        """Raises `Cancelled` if the person asked to stop."""
        if self._job.stop.is_set():
            raise Cancelled("Cancelled.")

    @property
    def cancelled(self) -> bool:
        """Whether the person asked to stop, for code that takes a callable."""
        return self._job.stop.is_set()


@dataclass
class _Quick:
    work: Callable[[], Any]
    finished: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None
    abandoned: bool = False


class Worker:
    """The thread that owns the device, its queue of jobs and its short calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._jobs: dict[str, Job] = {}
        self._running: Job | None = None
        self._quick: queue.SimpleQueue[_Quick] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._live, name="headscope-device", daemon=True)
        self._thread.start()

    def submit(self, owner: str, kind: str, title: str, work: Callable[[Context], Any]) -> Job:
        """Queues work. `Busy` if this session already has a job: one a session keeps the queue fair."""
        with self._lock:
            if any(job.owner == owner and job.open for job in self._jobs.values()):
                raise Busy("This session already has a run under way: wait for it, or cancel it first.")
            job = Job(owner, kind, title, work)
            self._jobs[job.id] = job
            self._waiting.append(job)
            self._forget()
        self._wake.set()
        return job

    def quick(self, work: Callable[[], T], timeout: float = 30.0) -> T:
        """Runs a short call on the device's thread and returns its result, or raises what it raised."""
        if self.here:
            return work()
        call = _Quick(work)
        self._quick.put(call)
        self._wake.set()
        if not call.finished.wait(timeout):
            call.abandoned = True
            raise Busy(f"The device was busy for {timeout:.0f} s with another run: try again in a moment.")
        if isinstance(call.error, Exception):
            raise call.error
        if call.error is not None:  # it must not end the caller's thread either
            raise HeadscopeError(sentence(call.error)) from call.error
        result: T = call.result
        return result

    @property
    def here(self) -> bool:
        """Whether the caller runs on the device's thread."""
        return threading.current_thread() is self._thread

    def serve_quick(self) -> None:
        """Runs the short calls that wait. Called by the worker's thread only."""
        while True:
            try:
                call = self._quick.get_nowait()
            except queue.Empty:
                return
            if call.abandoned:
                continue
            try:
                call.result = call.work()
            except BaseException as error:  # a panic too must reach the caller, and leave the thread alive
                call.error = error
            finally:
                call.finished.set()

    def job(self, job_id: str) -> Job | None:
        """A job by its id, while it is remembered."""
        with self._lock:
            return self._jobs.get(job_id)

    def latest(self, owner: str) -> Job | None:
        """The last job of a session, finished or not."""
        with self._lock:
            mine = [job for job in self._jobs.values() if job.owner == owner]
        return mine[-1] if mine else None

    def position(self, job: Job) -> int:
        """How many jobs go before this one: 0 when it runs or is next on an idle device."""
        with self._lock:
            if job not in self._waiting:
                return 0
            return self._waiting.index(job) + (1 if self._running else 0)

    def close(self) -> None:
        """Stops the thread after the work at hand; for tests."""
        self._closed = True
        with self._lock:
            for job in self._jobs.values():
                job.cancel()
        self._wake.set()
        self._thread.join(timeout=10)

    def _forget(self) -> None:
        ended = [job for job in self._jobs.values() if not job.open]
        for job in ended[: max(0, len(ended) - KEPT_JOBS)]:
            del self._jobs[job.id]

    def _live(self) -> None:
        """The thread from its start to its end; if that was not asked for, another takes over."""
        try:
            self._loop()
        finally:
            if not self._closed and not sys.is_finalizing():
                self._take_over()

    def _take_over(self) -> None:
        """Ends the work that went down with the thread, and starts a new one for what waits."""
        log.error("the device's thread ended; a new one takes over")
        with self._lock:
            job, self._running = self._running, None
        if job is not None and job.open:
            _end(job, "failed", ENDED)
        self._wake.set()
        self._start()

    def _loop(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            self.serve_quick()
            while (job := self._next()) is not None:
                self._run(job)
                self.serve_quick()

    def _next(self) -> Job | None:
        with self._lock:
            self._running = self._waiting.popleft() if self._waiting and not self._closed else None
            return self._running

    def _run(self, job: Job) -> None:
        job.started = time.monotonic()
        job.state = "running"
        state, problem = "failed", ""
        try:
            context = Context(self, job)
            context.check()
            job.result = job.work(context)
            state = "done"
        except Cancelled:
            state = "cancelled"
        except BaseException as error:  # a panic too ends the job alone
            state = "cancelled" if job.stop.is_set() else "failed"
            problem = sentence(error)
        with self._lock:
            self._running = None
        _end(job, state, problem)


def _end(job: Job, state: str, problem: str) -> None:
    job.error = problem
    job.ended = time.monotonic()
    job.state = state
    job.finished.set()


def sentence(error: BaseException) -> str:
    """What a page shows for an error: our own sentences as they are, of others only the kind.

    Foreign messages may quote the prompt, so neither the page nor the log gets them.
    """
    if isinstance(error, HeadscopeError):
        return str(error)
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return "There was not enough memory: use a shorter prompt, or close other programs and run again."
    if isinstance(error, OSError) and error.errno == 28:
        return "The disk is full: free some space and try again, nothing was lost."
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f"{frame.tb_frame.f_code.co_name}:{frame.tb_lineno}" if frame is not None else "unknown place"
    log.error("unexpected %s in %s", type(error).__name__, where)
    return (
        f"Something unexpected went wrong ({type(error).__name__} in {where}): nothing was lost, you can run it again."
    )
