"""Files that time or a hand has damaged: whatever is changed in them, they are read or refused with one sentence."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.inputs import LayerInputs, LayerVisitor
from headscope.engine.base.errors import HeadscopeError
from headscope.engine.base.progress import Cancel
from headscope.engine.config.file import HeadConfig
from headscope.engine.config.host import HostProfile
from headscope.engine.config.sets import ConfigSet, Member
from headscope.engine.model.load import LoadedModel
from headscope.engine.patterns.families import AShape, BlockSparse, Fraction, VerticalSlash
from headscope.engine.runs.capture import Capture, capture
from headscope.engine.search import run as search
from headscope.engine.search.cost import CostModel, Fit
from headscope.engine.search.grid import Grid
from headscope.engine.search.results import SearchPrompt, Settings, read_prompt
from headscope.engine.search.table import Target

FACTS: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "layers": 2,
    "query_heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "rope": {"type": "default", "theta": 1e5, "scaling": {}},
    "max_position": 4096,
    "layer_types": ["full_attention"] * 2,
    "fingerprint": "ab" * 32,
    "load_format": "gguf",
    "name": "toy",
}
JUNK: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 1.5, -0.5, 1e300, -1e300, 10**17, -(10**17), 10**30),
    *("", " ", "x", "0", "-1", "x" * 999, "\u0663", "{}", "dense", "\ud800"),
    *([], {}, [[]], [None], [0, 1], {"": 0}, {"x": {"y": []}}, {"of": 0.5}, [{}] * 3),
)


def config() -> HeadConfig:
    made = HeadConfig.uniform(FACTS, AShape(4, 64), provenance={"lengths": [96, 4096]})
    return made.with_heads({(1, 1): VerticalSlash(Fraction(0.05, least=16), 256, local=16)}).forced_onto(
        FACTS | {"fingerprint": "cd" * 32}
    )


def grid() -> Grid:
    return Grid((AShape(4, 16), VerticalSlash(8, 8), BlockSparse(1)))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def damaged(value: Any, rng: random.Random) -> str:
    """JSON with one to three things replaced, left out, added or exchanged, and now and then with wrong bytes."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        every = list(places(value))
        if not every:
            break
        path = rng.choice(every)
        spot = value
        for key in path[:-1]:
            spot = spot[key]
        how = rng.randrange(6)
        if how < 3:
            spot[path[-1]] = copy.deepcopy(rng.choice(JUNK))
        elif how == 3:
            del spot[path[-1]]
        elif how == 4 and isinstance(spot, dict):
            spot[rng.choice(("x", "", "layer", *(str(key) for key in spot)))] = copy.deepcopy(rng.choice(JUNK))
        elif isinstance(spot, list):
            spot.insert(path[-1], copy.deepcopy(rng.choice(spot)))
    text = json.dumps(value)
    if rng.random() < 0.1:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(("", "NaN", "1e999", '"', "[", "}", "\0", '"a": 1, "a": 1,')) + text[at + 1 :]
    return text


def is_sentence(problem: HeadscopeError) -> bool:
    text = str(problem)
    return 0 < len(text) < 1500 and "\n" not in text and "Input should" not in text


def use_config(path: Path) -> None:
    made = HeadConfig.load(path)
    made.check(FACTS), made.warnings(100), made.digest(), made.patterns(0)
    assert HeadConfig.from_json(made.to_json()) == made
    made.forced_onto(FACTS)


def use_set(path: Path) -> None:
    made = ConfigSet.load(path)
    made.check(FACTS), made.pick(50, made.names[0])


def use_cost(path: Path) -> None:
    made = CostModel.load(path)
    assert made.head_ms(AShape(4, 64), 100, 8192) >= 0 and made.base_ms(["dense"]) >= 0 and made.unit
    assert made.dense_layer_ms(100, 2) >= 0 and made.other_ms(100) >= 0
    json.dumps(made.to_dict(), allow_nan=False)


READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "config": (lambda path: config().save(path), use_config),
    "set": (lambda path: ConfigSet((Member(config(), most=90), Member(config(), least=91))).save(path), use_set),
    "host": (
        lambda path: HostProfile({"gpu": "H200"}, {1: 4096}, {"x": 1}).save(path),
        lambda path: HostProfile.load(path).dense_below_tokens(1),
    ),
    "grid": (lambda path: grid().save(path), lambda path: Grid.load(path).digest()),
    "cost": (
        lambda path: CostModel(
            0.1, CostModel.tiles().heads, (0.1, 0.2), (3.0, 4.0), {"hardware": "x"}, Fit(9, 1, 0.1, 0.2, 0.0, 0.1)
        ).save(path),
        use_cost,
    ),
}


def attack(home: Path, files: Sequence[Path], use: Callable[[], Any], count: int, seed: int = 0) -> int:
    """Damages one of `files` at a time, `count` times, and returns how many were refused."""
    rng = random.Random(seed)
    whole = {path: path.read_text() for path in files}
    values = {path: json.loads(text) for path, text in whole.items()}
    refused = 0
    for number in range(count):
        path = rng.choice(list(files))
        text = damaged(values[path], rng)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            use()
        except HeadscopeError as problem:
            assert is_sentence(problem), (str(problem), text[:2000])
            refused += 1
        except Exception as problem:
            raise AssertionError(f"number {number}, {path.name}: {problem!r} for {text[:4000]}") from problem
        path.write_text(whole[path])
    return refused


@pytest.mark.parametrize("count", [400, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(name: str, count: int, tmp_path: Path) -> None:
    save, use = READERS[name]
    path = tmp_path / "file.json"
    save(path)
    use(path)
    assert attack(tmp_path, [path], lambda: use(path), count, seed=count) > count // 3


class _Noise:
    """Q, K and V of two layers that say nothing, 96 tokens long."""

    def stream(self, prompt: SearchPrompt, visit: LayerVisitor, layers: Sequence[int], cancel: Cancel | None) -> None:
        for layer in layers:
            generator = torch.Generator().manual_seed(layer)
            q, k, v = (torch.randn(1, heads, 96, 16, generator=generator) for heads in (2, 1, 1))
            visit(layer, LayerInputs(q, k, v, 0.25))

    def prefill_ms(self, prompt: SearchPrompt) -> float:
        return 5.0


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("run")
    prompts = [
        SearchPrompt(f"{name}.txt", "prose", tuple(range(at, at + 96)), "00" * 32) for at, name in enumerate("ab")
    ]
    settings = Settings((0, 1), grid(), Estimator())
    search.measure(_Noise(), prompts, settings, home, facts=FACTS)
    return home


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_damaged_run_folder_is_read_or_refused(count: int, run_folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(run_folder, home)

    def use() -> None:
        results, settings, facts = search.read_run(home)
        for cost in (CostModel.tiles(), None):
            search.choose(results, settings, Target(max_missed=0.2), home, facts, cost)
        for path in (home / "prompts").iterdir():
            read_prompt(home, path.stem)

    use()
    files = [home / "search.json", *(home / "results").iterdir(), *(home / "prompts").iterdir()]
    with np.errstate(all="ignore"):
        assert attack(home, files, use, count, seed=count) > count // 4


def test_a_damaged_part_of_a_run_is_refused_before_it_is_joined(run_folder: Path, tmp_path: Path) -> None:
    """A run that was stopped goes on from its parts; a damaged one must not end in a result file."""
    home = tmp_path / "run"
    shutil.copytree(run_folder, home)
    prompt = read_prompt(home, next((home / "prompts").iterdir()).stem)
    assert prompt is not None
    result = home / "results" / f"{prompt.key}.json"
    layers = json.loads(result.read_text())["layers"]
    result.unlink()
    parts = home / "parts" / prompt.key
    parts.mkdir(parents=True)
    settings = Settings((0, 1), grid(), Estimator())
    for change in ({"dense_ms": "x"}, {"rows": []}, {"layer": 1}, {"mixed": [{"picked": [9, 9]}]}):
        (parts / "0000.json").write_text(json.dumps(layers[0] | change))
        (parts / "0001.json").write_text(json.dumps(layers[1]))
        with pytest.raises(HeadscopeError, match=r"0000\.json is damaged") as caught:
            search.measure(_Noise(), [prompt], settings, home, facts=FACTS)
        assert is_sentence(caught.value) and not result.exists()


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_damaged_capture_is_read_or_refused(count: int, tiny_llama: LoadedModel, tmp_path: Path) -> None:
    home = capture(tiny_llama, torch.arange(3, 23)[None], layers=[0, 2]).save(tmp_path / "kept")

    def use() -> None:
        with Capture.load(home) as kept:
            assert kept.tokens == 20
            for layer in kept.layers:
                inputs = kept.layer(layer)
                assert inputs.rows == 20 and inputs.scale > 0

    assert attack(home, [home / "capture.json"], use, count, seed=count) > count // 4
    rng = random.Random(count)
    for path in home.glob("*.safetensors"):
        whole = path.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        for _ in range(count // 3):
            raw = bytearray(whole)
            for _ in range(rng.choice((1, 1, 2, 8))):
                raw[rng.randrange(header)] = rng.randrange(256)
            path.write_bytes(raw[: rng.choice((len(raw), len(raw), rng.randrange(len(raw))))])
            try:
                use()
            except HeadscopeError as problem:
                assert is_sentence(problem)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "tensors",
    [
        {"q": torch.zeros(1, 4, 20, 16), "k": torch.zeros(1, 2, 20, 16)},
        {name: torch.zeros(1, 2, 19, 16) for name in "qkv"},
        {name: torch.zeros(1, 2, 20, 16, dtype=torch.int64) for name in "qkv"},
        {"q": torch.zeros(1, 3, 20, 16), "k": torch.zeros(1, 2, 20, 16), "v": torch.zeros(1, 2, 20, 16)},
        {name: torch.zeros(20) for name in "qkv"},
    ],
    ids=["no values", "other length", "whole numbers", "heads that do not divide", "flat"],
)
def test_a_layer_of_other_tensors_is_refused(
    tensors: dict[str, torch.Tensor], tiny_llama: LoadedModel, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    home = capture(tiny_llama, torch.arange(3, 23)[None], layers=[1]).save(tmp_path / "kept")
    save_file(tensors, home / "layer-0001.safetensors")
    with Capture.load(home) as kept, pytest.raises(HeadscopeError, match="is damaged"):
        kept.layer(1)
