"""What every registered family owes the rest of headscope, and files written before a family existed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.index import build_index
from headscope.engine.attend.inputs import ScoreInputs
from headscope.engine.base.errors import ConfigError
from headscope.engine.config import interop
from headscope.engine.config.file import HeadConfig, HeadEntry
from headscope.engine.loss.oracle import loss_split
from headscope.engine.patterns.base import COLOURS, ORACLES, Field, Look, Pattern
from headscope.engine.patterns.families import FAMILIES, AShape, Budget, Dense, Fixed, Fraction, from_dict
from headscope.engine.patterns.foreign import KNOWN, ForeignHead
from headscope.engine.patterns.registry import register
from headscope.engine.search.cost import TILE_CELLS, CostModel, fit
from headscope.engine.search.grid import Grid, default_grid
from headscope.engine.search.results import PromptResult
from headscope.engine.search.run import choose, read_run
from headscope.engine.search.table import Table, Target, allocate
from headscope.kernels.torch.attention import dense

LENGTHS = (1, 63, 64, 65, 1000)
OLD_SEARCH = Path(__file__).parent / "data" / "search_of_four_families"
"""A run folder that was written when dense, a-shape, vertical-slash and block-sparse were all that a search knew."""


def samples(family: type[Pattern]) -> list[Pattern]:
    """The forms of a family: as an editor starts it, with its switch, scaled, and with shares."""
    if family.one_prompt:
        return [family()]
    start = family.default(1000)
    forms = [start, start.switched(True), start.switched(False), start.scaled(2.0, 1000) or start]
    shares = {field.name: Fraction(0.1, least=field.least) for field in start.active_fields if field.share}
    return list(dict.fromkeys([*forms, dataclasses.replace(start, **shares)]))


EVERY = [pattern for family in FAMILIES.values() for pattern in samples(family)]


@pytest.fixture
def open_registry() -> Iterator[None]:
    """Families that a test registers are gone after it."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.mark.parametrize("pattern", EVERY, ids=lambda one: one.label)
def test_a_family_plans_every_length_and_survives_its_json(pattern: Pattern) -> None:
    assert from_dict(pattern.to_dict()) == pattern
    assert pattern.label.startswith(pattern.kind)
    for length in LENGTHS:
        plan = pattern.plan(length)
        assert all(0 <= low <= high for low, high in plan.bands) and all(column < length for column in plan.columns)
        assert pattern.online == bool(plan.online_slash or plan.top_blocks)
        assert pattern.sampled == plan.online_slash
        assert isinstance(pattern.covers_all(length), bool)
        assert not pattern.is_dense or pattern.covers_all(length)


@pytest.mark.parametrize("pattern", EVERY, ids=lambda one: one.label)
def test_what_covers_all_is_what_the_index_computes(pattern: Pattern) -> None:
    for length in (1, 63, 64, 65, 400):
        x = torch.randn(1, 1, length, 8)
        whole = int(build_index(x, x, [pattern]).computed_pairs()) == length * (length + 1) // 2
        assert whole or not pattern.covers_all(length)
        assert not whole or pattern.online or pattern.one_prompt or pattern.covers_all(length)


@pytest.mark.parametrize("pattern", EVERY, ids=lambda one: one.label)
@pytest.mark.parametrize("tool", KNOWN)
def test_a_family_is_exported_or_the_sentence_says_what_is_lost(pattern: Pattern, tool: str) -> None:
    head = HeadEntry(pattern)
    config = HeadConfig({"layers": 1, "query_heads": 1}, {}, "tiles/1", Estimator(), ((head,),))
    export = interop.export_foreign(config, tool, lossy=True)
    name, first, second, score = export.layers[0]["0"]
    assert name in KNOWN[tool] and first >= 0 and second >= 1 and score == 0.0
    if export.notes:
        with pytest.raises(ConfigError, match=r"layer 0 head 0.*--lossy"):
            interop.export_foreign(config, tool)
    else:
        assert interop.import_foreign(export.layers, tool).patterns(0) == (pattern,)


@pytest.mark.parametrize("pattern", EVERY, ids=lambda one: one.label)
def test_the_loss_of_every_family_splits_into_four_steps(pattern: Pattern) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 200, 16), torch.randn(1, 1, 200, 16)
    index = build_index(q, k, [pattern])
    split = loss_split(ScoreInputs(q, k), dense(q, k, k, index.scale, (0,))[1], index, 0)
    assert sum(split.steps) == pytest.approx(split.computed)
    assert split.top_k <= split.geometric + 1e-6 and split.top_k <= split.online + 1e-6
    if pattern.oracle == "own":
        assert split.geometric == pytest.approx(split.online)


def test_budgets_scale_up_and_down() -> None:
    for family in FAMILIES.values():
        if family.fields:
            start = family.default(4096)
            few, many = start.scaled(0.5, 4096), start.scaled(2.0, 4096)
            assert few is not None and many is not None and len({few, start, many}) == 3
            assert start.scaled(1.0, 4096) == start


def test_traits_are_told_apart() -> None:
    every = list(FAMILIES.values())
    assert list(FAMILIES) == [family.kind for family in sorted(every, key=lambda family: family.rank)]
    for trait in ("kind", "rank"):
        assert len({getattr(family, trait) for family in every}) == len(every)
    for part in ("glyph", "marker", "colour"):
        assert len({getattr(family.look, part) for family in every}) == len(every)
    assert all(family.look.colour in COLOURS and family.oracle in ORACLES for family in every)
    roots = [family.kind for family in every if family.cost_as == family.kind]
    assert roots == ["dense", "a-shape", "vertical-slash", "block-sparse"]  # what every cost model on a disk holds


def test_the_default_grid_is_what_it_was() -> None:
    assert default_grid().digest() == "819220dd8742bc109bc182063243b494543b69a7ed28d0e845508f7cf917f274"


def later(**changed: object) -> type[Pattern]:
    """A family of a later version, with some traits changed or (None) left out."""

    def exported(self: Pattern, tool: str) -> ForeignHead:
        return AShape(0, 1).exported(tool)

    traits: dict[str, object] = {
        "__annotations__": {"window": Budget},
        "__doc__": "A window.",
        "kind": "later-shape",
        "rank": 17,
        "look": Look("◐", "hexagon", "gold"),
        "fields": (Field("window", "Window", "Recent tokens", 1),),
        "oracle": "own",
        "cost_as": "a-shape",
        "plan": lambda self, length: AShape(0, self.window).plan(length),
        "default": classmethod(lambda cls, length: cls(64)),
        "scaled": lambda self, factor, length: type(self)(round(factor * self.window)),
        "amounts": lambda self: ((self.window, ""),),
        "exported": exported,
    }
    kept = {name: value for name, value in {**traits, **changed}.items() if value is not None}
    return dataclass(frozen=True)(type("Later", (Pattern,), kept))


@pytest.mark.usefixtures("open_registry")
def test_a_whole_family_is_registered_in_its_place() -> None:
    family = register(later())
    assert list(FAMILIES).index("later-shape") == list(FAMILIES).index("vertical-slash") - 1
    assert from_dict({"pattern": "later-shape", "window": 5}) == family(5)  # type: ignore[call-arg]


@pytest.mark.usefixtures("open_registry")
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rank": None}, "it has no rank"),
        ({"look": None}, "it has no look"),
        ({"oracle": None}, "it has no oracle"),
        ({"cost_as": None}, "it has no cost_as"),
        ({"plan": None}, r"it has no plan\(\)"),
        ({"exported": None}, r"it has no exported\(\)"),
        ({"default": None}, r"it has no default\(\)"),
        ({"scaled": None}, r"it has no scaled\(\)"),
        ({"amounts": None}, r"it has no amounts\(\)"),
        ({"foreign_name": "later"}, r"it has no imported\(\)"),
        ({"fields": (), "rank": None}, "no rank; fields does not describe window"),
        ({"fields": (Field("width", "", "", 1),)}, "its field width is not in the class; fields does not describe"),
        ({"kind": "a-shape"}, "kind is that of AShape"),
        ({"rank": 10}, "rank is that of AShape"),
        ({"look": Look("▲", "square", "gold")}, "look.glyph '▲' is that of AShape; look.marker 'square' is that of Bl"),
        ({"look": Look("◐", "hexagon", "mauve")}, "look.colour must be one of grey, violet"),
        ({"oracle": "delphi"}, "oracle must be one of"),
        ({"cost_as": "no-shape"}, "cost_as must be a family"),
    ],
)
def test_an_incomplete_family_is_refused_when_it_is_imported(changed: dict[str, object], words: str) -> None:
    before = dict(FAMILIES)
    with pytest.raises(TypeError, match=rf"The pattern family Later cannot be registered: .*{words}"):
        register(later(**changed))
    assert before == FAMILIES


def test_a_class_that_is_no_frozen_dataclass_is_refused() -> None:
    class Loose(Pattern):
        kind = "loose"

    with pytest.raises(TypeError, match="must be a frozen dataclass"):
        register(Loose)


def test_a_search_of_before_is_read_and_chosen_from_as_before(tmp_path: Path) -> None:
    results, settings, facts = read_run(OLD_SEARCH)
    cost = CostModel.load(OLD_SEARCH / "cost-model.json")
    assert cost == fit(results, settings.grid, {"hardware": "toy"})
    for target, picked in (
        (Target(max_missed=0.05), [[0, 0], [1, 3]]),
        (Target(speedup=1.05), [[1, 3], [3, 3]]),
    ):
        chosen = choose(results, settings, target, tmp_path, facts, cost)
        assert chosen.allocation.picked.tolist() == picked
    assert choose(results, settings, Target(max_missed=0.05), tmp_path, facts, cost).summary["predicted"] == {
        "attention_ms": 19.159999999999997,
        "dense_attention_ms": 24.0,
        "other_ms": 76.0,
        "speedup": 1.0508617065994115,
    }


@pytest.mark.usefixtures("open_registry")
def test_a_cost_model_of_before_predicts_a_later_family_as_the_one_it_names() -> None:
    family = register(later())
    mine: Pattern = family(64)  # type: ignore[call-arg]
    results, settings, _ = read_run(OLD_SEARCH)
    cost = CostModel.load(OLD_SEARCH / "cost-model.json")
    assert cost.head_ms(mine, 2048, 100 * TILE_CELLS) == cost.head_ms(AShape(4, 64), 2048, 100 * TILE_CELLS)
    assert cost.base_ms(["a-shape", "later-shape"]) == cost.base_ms(["a-shape"]) == cost.base_ms(["later-shape"])
    assert CostModel.tiles().head_ms(mine, 2048, 100 * TILE_CELLS) == 100
    # The same measurements once more under the later family's name: the choice may take it, and a model fitted with it
    # holds it.
    grid = Grid((*settings.grid.candidates, mine))
    layers = tuple({**layer, "rows": [*layer["rows"], layer["rows"][1]]} for layer in results[0].layers)
    again = [PromptResult(results[0].prompt, results[0].prefill_ms, layers)]
    table = Table.of(again, grid)
    assert allocate(table, cost, Target(max_missed=0.05)).picked.tolist() == [[0, 0], [1, 3]]  # simpler at a tie
    fitted = fit(again, grid, {})
    assert list(fitted.heads) == ["dense", "a-shape", "later-shape", "vertical-slash", "block-sparse"]
    assert fitted.counts_as("later-shape") == "later-shape"
    assert CostModel.from_dict(fitted.to_dict(), "file") == fitted


def test_a_cost_model_with_a_broken_extra_family_is_refused() -> None:
    value = CostModel.load(OLD_SEARCH / "cost-model.json").to_dict()
    value["heads"]["later-shape"] = {"layer": 0.0}
    with pytest.raises(ConfigError, match=r"heads.later-shape lacks the field 'fixed'"):
        CostModel.from_dict(value, "file")


def test_fixed_heads_are_predicted_but_never_searched() -> None:
    cost = CostModel.load(OLD_SEARCH / "cost-model.json")
    assert cost.head_ms(Fixed((1,)), 2048, TILE_CELLS) == cost.head_ms(AShape(4, 64), 2048, TILE_CELLS)
    with pytest.raises(ConfigError, match="Candidate 1 is a Fixed pattern, which fits one prompt only"):
        Grid((Dense(), Fixed((1,))))
