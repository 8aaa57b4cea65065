"""Sample prompts are sound, long prompts hold their length and seed, and hidden answers are where they should be."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headscope.engine.base.errors import PromptError
from headscope.engine.cli.prompt import prompt
from headscope.engine.prompts import retrieval
from headscope.engine.prompts import sources as prompts

SAMPLES = prompts.list_prompts()
KINDS = {"source code", "prose", "key-value retrieval", "needle in a haystack", "dialogue", "table"}


def encode(text: str) -> Sequence[str]:
    """A stand-in for a tokenizer: pieces of words and single marks."""
    return re.findall(r"\w{1,5}|\W", text)


def test_there_is_a_sample_of_every_kind() -> None:
    assert {sample.kind for sample in SAMPLES} == KINDS
    files = {path.name for path in prompts.FOLDER.glob("*.txt")}
    assert {sample.path.name for sample in SAMPLES} == files
    assert all(sample.title and len(sample.look_for) > 80 for sample in SAMPLES)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_sample_is_plain_text_whose_answer_stands_in_it_once(sample: prompts.SamplePrompt) -> None:
    raw = sample.path.read_bytes()
    text = sample.read().text
    assert raw.endswith(b"\n") and b"\r" not in raw and b"\t" not in raw
    assert text == text.rstrip() and 2000 < len(text) < 10_000
    if sample.expected is not None:
        assert text.count(sample.expected) == 1
        # The answer is out of reach of a short window, and the text stops where it must follow.
        assert text.index(sample.expected) < len(text) * 0.75
        assert text.splitlines()[-1].startswith(("Answer: ", "young-valley:"))


@pytest.mark.model
def test_samples_have_800_to_2500_tokens(smollm2: Any) -> None:
    counts = {sample.name: len(smollm2.tokenizer(sample.read().text).input_ids) for sample in SAMPLES}
    assert all(800 <= count <= 2500 for count in counts.values()), counts
    assert counts["code"] >= 2048


def test_the_code_sample_runs_and_its_own_test_passes() -> None:
    source = prompts.read_prompt("code").text + "\n\ntest_a_cancelled_car_makes_room_for_the_next_one()\n"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_the_register_and_the_table_have_one_line_for_each_question() -> None:
    body, repeated = prompts.read_prompt("key_value").text.split("The same lines again")
    register = re.findall(r"^([a-z]+-[a-z]+): (\d{4})$", body, re.M)
    assert len(register) == len({key for key, _ in register}) == len({value for _, value in register}) == 112
    asked = repeated.splitlines()[-1].removesuffix(":")
    assert dict(register)[asked] == "5034"
    assert set(re.findall(r"^(\S+): (\d{4})$", repeated, re.M)) < set(register)
    rows = [line for line in prompts.read_prompt("table").text.splitlines() if "| Wed | 18:00 | Calder Mill" in line]
    assert len(rows) == 1 and " 2.42 " in rows[0]


def test_a_prompt_is_found_by_name_or_by_path(tmp_path: Path) -> None:
    code = prompts.read_prompt("code")
    assert prompts.read_prompt("code.txt") == code == prompts.read_prompt("sample_prompts/code.txt")
    path = tmp_path / "mine.txt"
    path.write_bytes(b"\xef\xbb\xbf  two lines\r\nwith an end\r\n\r\n")
    assert prompts.read_prompt(path).text == "  two lines\nwith an end"
    (tmp_path / "other.md").write_text("text")
    (tmp_path / "left.out").write_bytes(b"\0")
    assert [prompt.name for prompt in prompts.read_folder(tmp_path)] == ["mine.txt", "other.md"]


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "empty"),
        (b" \n\t \n", "blank"),
        (b"text \x00 more", "byte 5 is zero"),
        ("größer".encode("latin-1"), "not UTF-8 text (byte 2)"),
        ("text".encode("utf-16"), "UTF-16"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "not text"),
    ],
)
def test_a_bad_prompt_file_is_one_sentence(tmp_path: Path, raw: bytes, word: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(raw)
    with pytest.raises(PromptError) as caught:
        prompts.read_prompt(path)
    assert str(caught.value).startswith(str(path)) and word in str(caught.value)


def test_what_is_no_prompt_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="sample prompts are code, prose"):
        prompts.read_prompt("cod")
    for path in (tmp_path, tmp_path / "missing.txt", Path("/dev/zero"), "x" * 5000, "a\0b", ""):
        with pytest.raises(PromptError):
            prompts.read_prompt(path)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(PromptError):
            prompts.read_folder(path)


@pytest.mark.parametrize("source", prompts.SOURCES)
@pytest.mark.parametrize("tokens", [256, 4096, 60_000])
def test_a_long_prompt_stays_just_below_its_length(source: str, tokens: int) -> None:
    made = prompts.long_prompt(tokens, seed=5, encode=encode, source=source)
    assert made.counted and made.tokens == len(encode(made.text))
    assert tokens - max(8, tokens // 1000) <= made.tokens <= tokens
    assert len(set(made.pieces)) == len(made.pieces)
    for name in made.pieces:
        assert f"### {name}\n" in made.text or name == made.pieces[-1]


def test_the_seed_decides_and_an_estimate_says_so() -> None:
    first = prompts.long_prompt(5000, seed=1, encode=encode)
    assert prompts.long_prompt(5000, seed=1, encode=encode) == first
    assert prompts.long_prompt(5000, seed=2, encode=encode).text[:2000] != first.text[:2000]
    guess = prompts.long_prompt(5000, seed=1)
    assert not guess.counted and abs(guess.tokens - 5000) <= 1
    kinds = {name.startswith("Python documentation") for name in prompts.long_prompt(20_000).pieces}
    assert kinds == {True, False}


def test_a_million_tokens_are_made_without_a_tokenizer() -> None:
    made = prompts.long_prompt(1_000_000)
    assert made.tokens >= 1_000_000 - 1 and len(made.text) > 3_000_000


@pytest.mark.parametrize("tokens", [0, -5, 255, 2**21 + 1, True, 1.5, "many"])
def test_lengths_out_of_range_are_refused(tokens: Any) -> None:
    with pytest.raises(PromptError, match="256 to"):
        prompts.long_prompt(tokens)
    with pytest.raises(PromptError, match="256 to"):
        retrieval.retrieval_prompt("needle", tokens, 0.5)


def test_a_closing_text_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PromptError, match="needs at least"):
        prompts.long_prompt(256, encode=encode, closing="word " * 300)
    with pytest.raises(PromptError, match="source"):
        prompts.long_prompt(256, source="web")


@given(
    kind=st.sampled_from(retrieval.KINDS),
    tokens=st.integers(256, 6000),
    depth=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_a_hidden_answer_stands_once_at_its_depth(kind: str, tokens: int, depth: float, seed: int) -> None:
    made = retrieval.retrieval_prompt(kind, tokens, depth, seed=seed, encode=encode)
    first, last = made.answer_at
    assert made.tokens == len(encode(made.text)) <= tokens
    assert made.text.count(made.expected) == 1 and made.expected in made.text[first:last]
    assert last <= made.question_at and made.expected not in made.text[made.question_at :]
    assert made.text == made.text.rstrip()  # the answer follows after a space
    if made.tokens > 2000:
        # Lines are not cut, so the depth is met to within a line.
        assert abs(first / (made.question_at - (last - first)) - depth) < 0.05
    again = retrieval.retrieval_prompt(kind, tokens, depth, seed=seed, encode=encode)
    assert again == made


def test_depth_moves_the_answer_and_nothing_else() -> None:
    low, high = (retrieval.retrieval_prompt("number", 4000, depth, seed=9, encode=encode) for depth in (0.1, 0.9))
    assert low.expected == high.expected and low.answer_at != high.answer_at
    assert sorted(low.text.splitlines()) == sorted(high.text.splitlines())


def test_a_register_asks_for_a_key_that_is_there_once() -> None:
    made = retrieval.retrieval_prompt("key-value", 60_000, 0.3, seed=2, encode=encode)
    keys = re.findall(r"^(\S+): \d+$", made.text[: made.question_at], re.M)
    solved = re.findall(r"^(\S+): \d+$", made.text[made.question_at :], re.M)
    assert len(solved) == 2 and set(solved) < set(keys)
    assert len(keys) == len(set(keys)) > 1000


def test_a_grid_covers_every_combination_in_order() -> None:
    grid = list(retrieval.retrieval_grid(("needle", "pass-key"), (300, 600), (0.0, 0.5, 1.0), (1, 2), encode=encode))
    assert len(grid) == 24
    assert [made.kind for made in grid] == ["needle"] * 12 + ["pass-key"] * 12
    assert [made.depth for made in grid[:6]] == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]


def test_bad_retrieval_arguments_are_refused() -> None:
    for kind, depth in (("riddle", 0.5), ("needle", -0.1), ("needle", 1.1), ("needle", float("nan")), ("needle", True)):
        with pytest.raises(PromptError):
            retrieval.retrieval_prompt(kind, 1000, depth)


@pytest.mark.parametrize(
    ("expected", "generated", "right"),
    [
        ("5034", " 5034.", True),
        ("5034", "the code 5034", True),
        ("5034", " 15034", False),
        ("5034", " 50345", False),
        ("5034", " 503", False),
        ("5034", "\n", False),
        ("5034", " 4711\n5034", False),
        ("a scarlet anchor", " A scarlet  anchor, of course", True),
        ("a scarlet anchor", " a scarlet anchorage", False),
        ("5034", "150340 and 5034", True),
    ],
)
def test_answers_are_judged_whole(expected: str, generated: str, right: bool) -> None:
    assert retrieval.is_answer(expected, generated) is right


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(prompt)
    return CliRunner().invoke(app, list(arguments))


def test_the_prompt_command_lists_prints_and_makes(tmp_path: Path) -> None:
    listing = run()
    assert listing.exit_code == 0 and all(sample.name in listing.stdout for sample in SAMPLES)
    assert run("code").stdout == prompts.read_prompt("code").text + "\n"
    out = tmp_path / "long.txt"
    made = run("--tokens", "4096", "--kind", "needle", "--depth", "0.25", "--seed", "3", "--out", str(out))
    assert made.exit_code == 0 and "the answer is: " in made.stderr and made.stdout == ""
    assert prompts.read_prompt(out).text == retrieval.retrieval_prompt("needle", 4096, 0.25, seed=3).text
    assert isinstance(run("code", "--tokens", "4096").exception, PromptError)
