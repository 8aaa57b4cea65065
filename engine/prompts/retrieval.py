"""Made prompts with one right answer: what a sparse prefill must not lose, by kind, length and depth.

Four kinds, all seeded: `pass-key` (a five-digit key in plain sentences), `number` (the same with ten digits, which
punishes a head that loses part of it), `needle` (an odd fact in documentation and source code) and `key-value` (one
line asked for again out of a register that fills the prompt). Texts are this project's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from headscope.engine.base.errors import PromptError
from headscope.engine.prompts.sources import Encode, check_tokens, fit, haystack

KINDS = ("pass-key", "number", "needle", "key-value")

_PLACES = ("harbour", "orchard", "station", "library", "bakery", "quarry", "theatre", "mill", "lighthouse", "museum")
_WEATHER = ("a light rain", "a pale sun", "some wind", "thin fog", "a late frost", "clear skies", "heavy clouds")
_PEOPLE = ("the porter", "the gardener", "the clerk", "the ferryman", "the teacher", "the baker", "the caretaker")
_DOINGS = ("swept the yard", "opened the shutters", "counted the crates", "fed the pigeons", "wrote a letter")
_THINGS = ("lantern", "kettle", "compass", "violin", "anchor", "ladder", "blanket", "mirror", "basket", "telescope")
_COLOURS = ("amber", "crimson", "ivory", "olive", "scarlet", "silver", "turquoise", "violet", "copper", "indigo")
_TOWNS = ("Ashford", "Brindle", "Corwen", "Dalmore", "Elsdon", "Fenwick", "Garston", "Hollin", "Ingleby", "Kelso")

_MOST_THREE_WORD_KEYS = 100_000
# fmt: off
_FIRST = (
    "amber", "brisk", "coral", "dusky", "early", "fallow", "gilded", "hollow", "ivory", "jolly", "kindly",
    "lunar", "mellow", "noble", "olive", "paper", "quiet", "rusty", "silver", "tidal", "upper", "velvet",
    "windy", "young", "ancient", "bitter", "clever", "dapper", "eager", "frosty", "gentle", "hasty", "idle",
    "joint", "keen", "lively", "misty", "narrow", "open", "plain", "rapid", "sturdy", "tender", "urban",
    "vivid", "warm", "yellow", "zesty",
)
_SECOND = (
    "anchor", "badger", "candle", "dahlia", "engine", "falcon", "garden", "hammer", "island", "jacket",
    "kettle", "ladder", "magnet", "needle", "orchid", "pebble", "quarry", "ribbon", "saddle", "timber",
    "urchin", "valley", "walnut", "yeoman", "acorn", "bridge", "copper", "donkey", "eagle", "forest", "glacier",
    "harvest", "insect", "jungle", "kitten", "lemon", "market", "napkin", "office", "pepper", "rocket",
    "summit", "tunnel", "uncle", "violin", "window", "yogurt", "zipper",
)
# fmt: on


@dataclass(frozen=True)
class RetrievalPrompt:
    """A prompt, the answer it must bring, and where the answer stands.

    `depth` is the share of the filler before the answer, 0 the start and 1 the end. `answer_at` is the range of
    characters of the line that holds it, `question_at` the character where the question begins. `text` ends so that
    the answer follows after a space.
    """

    kind: str
    text: str
    expected: str
    depth: float
    tokens: int
    counted: bool
    seed: int
    answer_at: tuple[int, int]
    question_at: int


def check_request(kind: str, tokens: int, depth: float) -> None:
    """`PromptError` for what `retrieval_prompt` cannot make, without making it."""
    if kind not in KINDS:
        raise PromptError(f"The kind of a retrieval prompt is one of {', '.join(KINDS)}, got {kind[:40]!r}.")
    check_tokens(tokens)
    if isinstance(depth, bool) or not isinstance(depth, int | float) or not 0 <= depth <= 1:
        raise PromptError(f"The depth of an answer is between 0 (start) and 1 (end), got {str(depth)[:40]}.")


def retrieval_prompt(
    kind: str, tokens: int, depth: float, *, seed: int = 0, encode: Encode | None = None
) -> RetrievalPrompt:
    """A prompt of `kind` with at most `tokens` tokens (see `sources.fit`) and the answer at `depth`.

    `PromptError` if the kind is unknown, the depth is outside 0 to 1, or the length is out of range.
    """
    check_request(kind, tokens, depth)
    parts = _parts(kind, seed)
    filler = _Lines(parts.filler)
    text, counted = fit(lambda size: _assemble(parts, filler.upto(size), depth)[0], tokens, encode)
    # The length of the text says which lines it holds, and so where the answer stands in it.
    haystack_text = filler.upto(len(text) - len(_assemble(parts, [], depth)[0]))
    text, answer_at, question_at = _assemble(parts, haystack_text, depth)
    return RetrievalPrompt(
        kind, text, parts.expected, float(depth), counted, encode is not None, seed, answer_at, question_at
    )


def retrieval_grid(
    kinds: Iterable[str],
    lengths: Iterable[int],
    depths: Iterable[float],
    seeds: Iterable[int] = (0,),
    *,
    encode: Encode | None = None,
) -> Iterator[RetrievalPrompt]:
    """Every combination, by kind, then length, then depth, then seed."""
    depth_list, seed_list, length_list = list(depths), list(seeds), list(lengths)
    for kind in kinds:
        for tokens in length_list:
            for depth in depth_list:
                for seed in seed_list:
                    yield retrieval_prompt(kind, tokens, depth, seed=seed, encode=encode)


def is_answer(expected: str, generated: str) -> bool:
    """Whether a generated text gives the expected answer: its first line holds it, whole.

    Case and spaces do not count; a longer number that merely contains the expected one does not pass.
    """
    line = " ".join(generated.strip().split("\n", 1)[0].lower().split())
    wanted = " ".join(expected.lower().split())
    at = line.find(wanted)
    while at >= 0:
        before = line[at - 1 : at]
        after = line[at + len(wanted) : at + len(wanted) + 1]
        if not before.isalnum() and not after.isalnum():
            return True
        at = line.find(wanted, at + 1)
    return False


@dataclass(frozen=True)
class _Parts:
    opening: str
    filler: Callable[[], Iterator[str]]
    answer_line: str
    question: str
    expected: str


class _Lines:
    """Filler lines, made once and in order, as many as fit a number of characters."""

    def __init__(self, make: Callable[[], Iterator[str]]) -> None:
        self._source = make()
        self._lines: list[str] = []
        self._ends: list[int] = []

    def upto(self, size: int) -> list[str]:
        while not self._ends or self._ends[-1] < size:
            line = next(self._source)
            self._lines.append(line)
            self._ends.append((self._ends[-1] if self._ends else 0) + len(line))
        count = next((number for number, end in enumerate(self._ends) if end > size), len(self._ends))
        return self._lines[:count]


def _assemble(parts: _Parts, lines: list[str], depth: float) -> tuple[str, tuple[int, int], int]:
    """Opening, filler with the answer's line at `depth` of its characters, question."""
    wanted = depth * sum(map(len, lines))
    count, passed = 0, 0
    while count < len(lines) and passed + len(lines[count]) / 2 <= wanted:
        passed += len(lines[count])
        count += 1
    before = parts.opening + "".join(lines[:count])
    body = before + parts.answer_line + "".join(lines[count:])
    return body + parts.question, (len(before), len(before) + len(parts.answer_line)), len(body)


def _parts(kind: str, seed: int) -> _Parts:
    rng = random.Random(f"headscope {kind} {seed}")
    if kind == "needle":
        return _needle(rng, seed)
    if kind == "key-value":
        return _key_value(rng, seed)
    digits = 5 if kind == "pass-key" else 10
    name = "pass key" if kind == "pass-key" else "registration number"
    key = str(rng.randrange(10 ** (digits - 1), 10**digits))
    return _Parts(
        opening=f"Somewhere in the following report a {name} is given. Remember it; you will be asked for it.\n\n",
        filler=lambda: _report(random.Random(f"headscope report {kind} {seed}")),
        answer_line=f"Note well: the {name} is {key}. It will not be given again.\n",
        question=f"\nQuestion: What is the {name}?\nAnswer: The {name} is",
        expected=key,
    )


def _report(rng: random.Random) -> Iterator[str]:
    """Sentences with nothing to find in them."""
    while True:
        yield (
            f"At the {rng.choice(_PLACES)} there was {rng.choice(_WEATHER)} in the morning, and "
            f"{rng.choice(_PEOPLE)} {rng.choice(_DOINGS)}.\n"
        )


def _needle(rng: random.Random, seed: int) -> _Parts:
    town, object_ = rng.choice(_TOWNS), rng.choice(_THINGS)
    hidden = f"a {rng.choice(_COLOURS)} {rng.choice([name for name in _THINGS if name != object_])}"
    return _Parts(
        opening="The following pages were found in one folder. Read them all.\n\n",
        filler=lambda: _pages(seed),
        answer_line=f"\nThe mayor of {town} traded the old {object_} for {hidden}.\n\n",
        question=f"\nQuestion: For what did the mayor of {town} trade the old {object_}?\n"
        f"Answer: The mayor of {town} traded the old {object_} for",
        expected=hidden,
    )


def _pages(seed: int) -> Iterator[str]:
    """Documentation and source code, line by line."""
    for name, text in haystack("mixed", seed):
        yield f"### {name}\n"
        for line in text.split("\n"):
            yield line + "\n"
        yield "\n"


def _key_value(rng: random.Random, seed: int) -> _Parts:
    value = str(rng.randrange(10000, 100000))
    key = _register_key(rng)

    def filler() -> Iterator[str]:
        return _register(random.Random(f"headscope register {seed}"), key, value)

    # Lines to repeat, two of them solved, and no sentence: small models can do this, so that a loss shows.
    solved = "".join(islice(filler(), 2))
    return _Parts(
        opening="Each line of this register gives a key and its value. Every key has one value.\n\n",
        filler=filler,
        answer_line=f"{key}: {value}\n",
        question=f"\nThe same lines again, as far as they were asked for today:\n\n{solved}{key}:",
        expected=value,
    )


def _register(rng: random.Random, asked: str, answer: str) -> Iterator[str]:
    """Lines with keys that do not come twice, none with the asked key or its value."""
    numbers_used = {asked}
    while True:
        key = _register_key(rng)
        if len(numbers_used) > _MOST_THREE_WORD_KEYS:  # of 221,184; a fourth word keeps them apart at any length
            key = f"{key}-{rng.choice(_SECOND)}"
        value = str(rng.randrange(10000, 100000))
        if key not in numbers_used and value != answer:
            numbers_used.add(key)
            yield f"{key}: {value}\n"


def _register_key(rng: random.Random) -> str:
    """Three words, of which the first two are rarely shared in a short register."""
    return f"{rng.choice(_FIRST)}-{rng.choice(_SECOND)}-{rng.choice((*_FIRST, *_SECOND))}"
