"""What is made once is made once, however many ask for it; what is not used goes."""

from __future__ import annotations

import threading
import time

import pytest

from headscope.studio.base.errors import Busy
from headscope.studio.lab.memo import Memo


def test_threads_that_ask_at_once_have_it_made_once() -> None:
    memo, calls, answers = Memo[int](4), list[int](), list[int]()

    def make() -> int:
        calls.append(1)
        time.sleep(0.05)
        return 42

    threads = [threading.Thread(target=lambda: answers.append(memo("key", make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and answers == [42] * 8


def test_who_waits_for_a_maker_that_fails_makes_it_itself() -> None:
    memo, answers, begun = Memo[int](4), list[int](), threading.Event()

    def fail() -> int:
        begun.set()
        time.sleep(0.05)
        raise ValueError("not today")

    def first() -> None:
        with pytest.raises(ValueError, match="not today"):
            memo("key", fail)

    one = threading.Thread(target=first)
    one.start()
    assert begun.wait(5)
    answers.append(memo("key", lambda: 7))
    one.join()
    assert answers == [7] and memo.get("key") == 7


def test_a_maker_that_comes_back_to_its_own_key_is_told_so_and_does_not_wait_for_itself() -> None:
    memo = Memo[int](4)
    with pytest.raises(Busy, match="same thing"):
        memo("key", lambda: memo("key", lambda: 1))
    assert memo("key", lambda: 2) == 2


def test_the_one_not_used_for_longest_goes() -> None:
    memo = Memo[int](2)
    memo.put("a", 1)
    memo.put("b", 2)
    assert memo.get("a") == 1
    memo.put("c", 3)
    assert "b" not in memo and dict(memo.items()) == {"a": 1, "c": 3}
