"""Head configs: exact round trips, every reason at once, and nothing but one sentence for a bad file."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base.errors import ConfigError
from headscope.engine.config.file import FORMAT, HeadConfig, HeadEntry
from headscope.engine.config.host import HostProfile, default_path
from headscope.engine.config.sets import ConfigSet, Member
from headscope.engine.patterns.families import AShape, BlockSparse, Dense, Fixed, Fraction, Pattern, VerticalSlash

FACTS: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "layers": 3,
    "query_heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "rope": {"type": "default", "theta": 100000.0, "scaling": {}},
    "max_position": 8192,
    "layer_types": ["full_attention"] * 3,
    "fingerprint": "ab" * 32,
    "load_format": "gguf",
    "name": "smollm2",
}


def facts(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(FACTS), **changes}


def small() -> HeadConfig:
    config = HeadConfig.uniform(FACTS, AShape(4, 64), provenance={"lengths": [1024, 4096], "seed": 7})
    entry = HeadEntry(VerticalSlash(Fraction(0.05, least=16), 256, local=16), {"missed_mass_mean": 0.03125})
    return config.with_heads({(1, 2): entry})


counts = st.integers(1, 5000)
shares = st.builds(Fraction, of=st.floats(1e-6, 1.0), least=st.integers(1, 64), most=st.none() | st.integers(64, 4096))
budgets = counts | shares
positions = st.lists(st.integers(0, 4096), max_size=5).map(tuple)


@st.composite
def vertical_slash(draw: st.DrawFn) -> VerticalSlash:
    sink, local = draw(st.integers(0, 30)), draw(st.integers(1, 100))
    vertical = draw(st.integers(sink, 5000) | shares)
    if draw(st.booleans()):
        return VerticalSlash(vertical, sink=sink, windows=draw(budgets))
    return VerticalSlash(vertical, draw(st.integers(local, 5000) | shares), sink=sink, local=local)


patterns: st.SearchStrategy[Pattern] = st.one_of(
    st.just(Dense()),
    st.builds(AShape, sink=st.integers(0, 200) | shares, window=budgets),
    vertical_slash(),
    st.builds(BlockSparse, blocks=budgets, block_size=st.sampled_from([16, 64, 128])),
    st.builds(
        Fixed,
        columns=positions,
        distances=positions,
        blocks=st.lists(st.tuples(st.integers(5, 9), st.integers(0, 5)), max_size=3).map(tuple),
    ),
)
numbers = st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
notes = st.dictionaries(texts, numbers | texts | st.booleans() | st.none() | st.lists(numbers, max_size=3), max_size=4)
entries = st.builds(HeadEntry, pattern=patterns, evidence=st.none() | notes)
estimators = st.builds(
    Estimator,
    rows=st.integers(1, 4096),
    where=st.sampled_from(["tail", "spread", "half"]),
    overlap=st.sampled_from(["keep", "removed"]),
)


@st.composite
def configs(draw: st.DrawFn) -> HeadConfig:
    layers, group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    model = facts(
        layers=layers, query_heads=group * kv_heads, kv_heads=kv_heads, layer_types=["full_attention"] * layers
    )
    heads = tuple(tuple(draw(entries) for _ in range(group * kv_heads)) for _ in range(layers))
    return HeadConfig(model, draw(notes), "tiles/1", draw(estimators), heads, draw(notes))


@given(configs())
@settings(max_examples=80, deadline=None)
def test_round_trip_is_exact_and_bytes_are_stable(config: HeadConfig) -> None:
    text = config.to_json()
    again = HeadConfig.from_json(text)
    assert again == config
    assert again.to_json() == text
    assert again.digest() == config.digest()
    assert json.loads(text)["format"] == FORMAT


def test_save_and_load(tmp_path: Path) -> None:
    path = small().save(tmp_path / "c.json")
    assert HeadConfig.load(path) == small()
    first = path.read_bytes()
    HeadConfig.load(path).save(path)
    assert path.read_bytes() == first


def test_one_head_a_line_so_that_a_diff_shows_the_head() -> None:
    before = small()
    after = before.with_heads({(2, 1): Dense()})
    lines = list(zip(before.to_json().splitlines(), after.to_json().splitlines(), strict=True))
    changed = [new for old, new in lines if old != new]
    assert changed == ['      {"at": [2, 1], "pattern": "dense"},']


def test_digest_is_over_patterns_alone() -> None:
    config = small()
    other = HeadConfig.uniform(facts(name="other"), AShape(4, 64), provenance={"created": "today"})
    other = other.with_heads({(1, 2): VerticalSlash(Fraction(0.05, least=16), 256, local=16)})
    assert other.digest() == config.digest()
    assert config.with_heads({(0, 0): AShape(4, 65)}).digest() != config.digest()


def test_patterns_of_a_layer_and_places_out_of_range() -> None:
    assert small().patterns(0) == (AShape(4, 64),) * 4
    assert small().patterns(1)[2].kind == "vertical-slash"
    for act in (
        lambda: small().patterns(3),
        lambda: small().patterns(-1),
        lambda: small().with_heads({(0, 4): Dense()}),
    ):
        with pytest.raises(ConfigError, match="There is no"):
            act()


def test_uniform_leaves_other_layers_dense() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = HeadConfig.uniform(facts(layer_types=types), BlockSparse(8))
    assert [config.patterns(layer)[0].kind for layer in range(3)] == ["dense", "block-sparse", "dense"]
    assert config.check(facts(layer_types=types)) == []


def test_check_lists_all_reasons_at_once() -> None:
    assert small().check(FACTS) == []
    assert small().check(FACTS, length=8192) == []
    other = facts(
        architecture="Qwen2ForCausalLM",
        layers=2,
        query_heads=8,
        kv_heads=4,
        head_dim=128,
        rope={"type": "yarn", "theta": 10000.0, "scaling": {"factor": 4.0}},
        max_position=4096,
        layer_types=["full_attention", "sliding_attention"],
        fingerprint="cd" * 32,
    )
    found = small().check(other, length=5000)
    words = (
        "architecture",
        "layers:",
        "query heads",
        "KV heads",
        "head size",
        "largest position",
        "RoPE type",
        "RoPE theta",
        "RoPE scaling",
        "layer types",
        "patterns: layers 1",
        "weights",
        "length: the prompt has 5000",
    )
    for word in words:
        assert sum(word in reason for reason in found) == 1, (word, found)
    assert len(found) == len(words)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architecture": "X"}, "architecture"),
        ({"kv_heads": 1}, "KV heads"),
        ({"head_dim": 80}, "head size"),
        ({"max_position": 2048}, "largest position"),
        ({"rope": {"type": "default", "theta": 10000.0, "scaling": {}}}, "RoPE theta"),
        ({"rope": {"type": "default", "theta": 100000.0, "scaling": {"factor": 2.0}}}, "RoPE scaling"),
        ({"fingerprint": "ef" * 32}, "weights"),
        ({"fingerprint": ""}, "weights"),
    ],
)
def test_each_difference_alone_is_one_reason(change: dict[str, Any], word: str) -> None:
    found = small().check(facts(**change))
    assert len(found) == 1 and word in found[0]
    assert len(small().check(facts(**change), force_weights=True)) == (0 if word == "weights" else 1)


def test_tiles_of_another_version_are_a_reason() -> None:
    config = HeadConfig(FACTS, {}, "tiles/9", Estimator(), small().heads)
    assert [reason for reason in config.check(FACTS) if "tiles/9" in reason]


def test_forced_weights_are_recorded_and_nothing_else_can_be_forced() -> None:
    other = facts(fingerprint="cd" * 32, name="finetune")
    forced = small().forced_onto(other)
    assert forced.check(other) == []
    assert forced.provenance["forced_weights"] == [{"from": "ab" * 32, "to": "cd" * 32, "model": "finetune"}]
    assert HeadConfig.from_json(forced.to_json()) == forced
    with pytest.raises(ConfigError, match="head size"):
        small().forced_onto(facts(head_dim=128))


def test_unknown_facts_are_a_reason() -> None:
    config = HeadConfig({"layers": 3, "query_heads": 4}, {}, "tiles/1", Estimator(), small().heads)
    found = config.check(FACTS, force_weights=True)
    assert len(found) == 1 and "architecture" in found[0] and "RoPE" not in found[0] and "--model" in found[0]


def test_lengths_outside_the_calibrated_ones_are_a_warning() -> None:
    assert small().warnings(1024) == [] == small().warnings(2000)
    assert "1024 to 4096" in small().warnings(8000)[0] and small().check(FACTS, length=8000) == []
    assert small().warnings(1023)
    assert "calibrated on 2184 tokens; this" in replace(small(), provenance={"lengths": [2184]}).warnings(40)[0]
    assert "does not say" in HeadConfig.uniform(FACTS, Dense()).warnings(100)[0]


def test_lengths_and_audit_that_fit_are_kept() -> None:
    for rate in (0, 0.05, 1):
        config = replace(small(), audit={"rate": rate, "thresholds": {"missed_mass": 0.1}})
        assert HeadConfig.from_json(config.to_json()) == config
    assert replace(small(), provenance={"lengths": []}).warnings(5)


def edited(change: Any) -> str:
    value = json.loads(small().to_json())
    made = change(value)
    return json.dumps(value if made is None else made)


BAD = {
    "no object": (lambda v: [v], "JSON object"),
    "other format": (lambda v: v.update(format="headscope.head-config/2"), "format"),
    "no heads": (lambda v: v.pop("heads") and None, "'heads'"),
    "unknown field": (lambda v: v.update(speed=3), "'speed'"),
    "unknown fact": (lambda v: v["model"].update(hidden=3), "'hidden'"),
    "missing fact": (lambda v: v["model"].pop("rope") and None, "'rope'"),
    "missing layer": (lambda v: v["heads"].pop() and None, "layer 2 is missing"),
    "extra layer": (lambda v: v["heads"].append(v["heads"][0]), "layer 3 head 0"),
    "missing head": (lambda v: v["heads"][1].pop() and None, "layer 1 head 3 is missing"),
    "null head": (lambda v: v["heads"][2].__setitem__(1, None), "layer 2 head 1 is missing"),
    "head is a number": (lambda v: v["heads"][2].__setitem__(1, 5), "layer 2 head 1"),
    "layer is an object": (lambda v: v["heads"].__setitem__(1, {}), "layer 1"),
    "heads out of order": (lambda v: v["heads"][0].reverse(), "layer 0 head 0"),
    "unknown pattern": (lambda v: v["heads"][2][1].update(pattern="spiral"), "layer 2 head 1"),
    "no pattern": (lambda v: v["heads"][2][1].pop("pattern") and None, "layer 2 head 1"),
    "pattern is a list": (lambda v: v["heads"][2][1].update(pattern=["dense"]), "layer 2 head 1"),
    "unknown budget": (lambda v: v["heads"][2][1].update(slash=5), "layer 2 head 1"),
    "missing budget": (lambda v: v["heads"][2][1].pop("window") and None, "layer 2 head 1"),
    "negative budget": (lambda v: v["heads"][2][1].update(sink=-1), "layer 2 head 1"),
    "zero window": (lambda v: v["heads"][2][1].update(window=0), "layer 2 head 1"),
    "bool budget": (lambda v: v["heads"][2][1].update(window=True), "layer 2 head 1"),
    "float budget": (lambda v: v["heads"][2][1].update(window=64.0), "layer 2 head 1"),
    "text budget": (lambda v: v["heads"][2][1].update(window="64"), "layer 2 head 1"),
    "huge budget": (lambda v: v["heads"][2][1].update(window=10**18), "layer 2 head 1"),
    "list budget": (lambda v: v["heads"][2][1].update(window=[64]), "layer 2 head 1"),
    "fraction above 1": (lambda v: v["heads"][1][2].update(vertical={"of": 1.5}), "layer 1 head 2"),
    "fraction of text": (lambda v: v["heads"][1][2].update(vertical={"of": "x"}), "layer 1 head 2"),
    "fraction with more": (lambda v: v["heads"][1][2].update(vertical={"of": 0.5, "x": 1}), "layer 1 head 2"),
    "slash below local": (lambda v: v["heads"][1][2].update(slash=3), "layer 1 head 2"),
    "evidence is text": (lambda v: v["heads"][2][1].update(evidence="good"), "layer 2 head 1"),
    "evidence is null": (lambda v: v["heads"][2][1].update(evidence=None), "layer 2 head 1"),
    "bool layers": (lambda v: v["model"].update(layers=True), "model.layers"),
    "zero layers": (lambda v: v["model"].update(layers=0), "model.layers"),
    "text heads": (lambda v: v["model"].update(query_heads="4"), "model.query_heads"),
    "odd groups": (lambda v: v["model"].update(kv_heads=3), "KV heads"),
    "rope is text": (lambda v: v["model"].update(rope="yarn"), "model.rope"),
    "layer types are numbers": (lambda v: v["model"].update(layer_types=[1, 2, 3]), "layer_types"),
    "too few layer types": (lambda v: v["model"].update(layer_types=["full_attention"]), "layer_types"),
    "tiles is a number": (lambda v: v.update(tiles=1), "tiles"),
    "provenance is a list": (lambda v: v.update(provenance=[]), "provenance"),
    "lengths are a number": (lambda v: v["provenance"].update(lengths=2184), "provenance.lengths"),
    "lengths are null": (lambda v: v["provenance"].update(lengths=None), "provenance.lengths"),
    "a length is text": (lambda v: v["provenance"].update(lengths=[512, "x"]), "provenance.lengths"),
    "a length is zero": (lambda v: v["provenance"].update(lengths=[0]), "provenance.lengths"),
    "a length is true": (lambda v: v["provenance"].update(lengths=[True]), "provenance.lengths"),
    "a length is a fraction": (lambda v: v["provenance"].update(lengths=[512.5]), "provenance.lengths"),
    "forced weights are a number": (lambda v: v["provenance"].update(forced_weights=3), "provenance.forced_weights"),
    "forced weights hold text": (lambda v: v["provenance"].update(forced_weights=["x"]), "provenance.forced_weights"),
    "audit rate above 1": (lambda v: v["audit"].update(rate=9), "audit.rate"),
    "audit rate below 0": (lambda v: v["audit"].update(rate=-0.1), "audit.rate"),
    "audit rate is text": (lambda v: v["audit"].update(rate="often"), "audit.rate"),
    "audit rate is true": (lambda v: v["audit"].update(rate=True), "audit.rate"),
    "audit rate is null": (lambda v: v["audit"].update(rate=None), "audit.rate"),
    "audit is null": (lambda v: v.update(audit=None), "audit"),
    "estimator of 0 rows": (lambda v: v["estimator"].update(rows=0), "estimator"),
    "estimator elsewhere": (lambda v: v["estimator"].update(where="middle"), "estimator"),
    "estimator unknown": (lambda v: v["estimator"].update(speed=1), "estimator"),
    "estimator list": (lambda v: v["estimator"].update(where=["tail"]), "estimator"),
}


@pytest.mark.parametrize(("change", "word"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_one_sentence_that_names_the_place(tmp_path: Path, change: Any, word: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(edited(change))
    with pytest.raises(ConfigError) as caught:
        HeadConfig.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and word in message and message.endswith(".")
    assert "\n" not in message and len(message) < len(str(path)) + 400


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, item in items for leaf in leaves(item, (*path, key)))]


JUNK = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1.5,
        10**17,
        10**400,
        float("nan"),
        float("inf"),
        "",
        "x" * 999,
        [],
        {},
        [[]],
        {"of": 0.5},
        [None],
    ]
)


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_any_one_value_replaced_loads_or_is_refused(data: st.DataObject) -> None:
    value = json.loads(small().to_json())
    path = data.draw(st.sampled_from(leaves(value)[1:]))
    spot = value
    for key in path[:-1]:
        spot = spot[key]
    spot[path[-1]] = data.draw(JUNK)
    try:
        loaded = HeadConfig.from_json(json.dumps(value))
    except ConfigError as problem:
        assert "\n" not in str(problem)
    else:
        assert HeadConfig.from_json(loaded.to_json()) == loaded


@given(st.integers(0, 2000), st.binary(max_size=6), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_any_bytes_replaced_load_or_are_refused(at: int, junk: bytes, length: int) -> None:
    raw = small().to_json().encode()
    raw = raw[:at] + junk + raw[at + length :]
    try:
        HeadConfig.from_json(raw)
    except ConfigError as problem:
        assert "\n" not in str(problem)


def test_values_that_no_file_can_hold_are_refused_at_once() -> None:
    for evidence in ({"x": float("nan")}, {"x": {1, 2}}, {1: 2}, {"x": "\ud800"}):
        with pytest.raises(ConfigError, match="evidence"):
            HeadEntry(Dense(), evidence)
    with pytest.raises(ConfigError, match="layer 0 head 3 is missing"):
        HeadConfig(FACTS, {}, "tiles/1", Estimator(), ((HeadEntry(Dense()),) * 3,) * 3)


def test_a_config_does_not_change_with_the_callers_dicts() -> None:
    model, evidence = facts(), {"runs": [1]}
    config = HeadConfig.uniform(model, Dense()).with_heads({(0, 0): HeadEntry(Dense(), evidence)})
    text = config.to_json()
    model["rope"]["theta"] = 1.0
    evidence["runs"].append(2)
    assert config.to_json() == text


def test_config_set_picks_by_length_and_name(tmp_path: Path) -> None:
    short, long, code = small(), HeadConfig.uniform(FACTS, Dense()), HeadConfig.uniform(FACTS, BlockSparse(4))
    made = ConfigSet((Member(short, most=2000), Member(long, least=3000), Member(code, name="code", least=10)))
    assert made.pick(1) == short == made.pick(2000)
    assert made.pick(2001) is None and made.pick(2999) is None
    assert made.pick(3000) == long == made.pick(10**6)
    assert made.pick(10, "code") == code and made.pick(9, "code") is None
    path = made.save(tmp_path / "set.json")
    assert ConfigSet.load(path) == made
    first = path.read_bytes()
    ConfigSet.load(path).save(path)
    assert path.read_bytes() == first
    assert made.check(FACTS) == []
    assert any(reason.startswith("code (10 to any tokens)") for reason in made.check(facts(head_dim=80)))
    with pytest.raises(ConfigError, match="default, code"):
        made.pick(5, "prose")


def test_config_set_refuses_what_is_ambiguous(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two configs claim prompts of 100 tokens"):
        ConfigSet((Member(small(), most=100), Member(small(), least=100)))
    with pytest.raises(ConfigError, match="at least one"):
        ConfigSet(())
    with pytest.raises(ConfigError, match="smaller"):
        Member(small(), least=10, most=9)
    two = ConfigSet((Member(small(), name="a"), Member(small(), name="b")))
    with pytest.raises(ConfigError, match="a, b"):
        two.pick(5)
    path = tmp_path / "bad.json"
    path.write_text('{"format": "headscope.config-set/1", "configs": [{"name": "a"}]}')
    with pytest.raises(ConfigError, match="config 0"):
        ConfigSet.load(path)
    single = small().save(tmp_path / "one.json")
    assert ConfigSet.load(single).pick(77) == small()


def test_host_profile_round_trip_and_unmeasured_is_never_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCOPE_HOST", str(tmp_path / "sub" / "host.json"))
    assert default_path() == tmp_path / "sub" / "host.json"
    assert HostProfile.load() == HostProfile() and HostProfile.load().dense_below_tokens() == 0
    made = HostProfile({"gpu": "H200"}, {1: 4096, 8: 0}, {"fixed_ms": 0.25})
    path = made.save()
    assert path == default_path() and HostProfile.load() == made
    assert made.dense_below_tokens(1) == 4096 and made.dense_below_tokens(2) == 0
    first = path.read_bytes()
    HostProfile.load().save()
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"format": "headscope.host-profile/1"}',
        '{"format": "headscope.host-profile/1", "machine": {}, "kernels": {"x": {}}, "dense_below": {}, "cost": {}}',
        '{"format": "headscope.host-profile/1", "machine": {}, "kernels": {}, "dense_below": {"1": -5}, "cost": {}}',
        '{"format": "headscope.host-profile/1", "machine": {}, "kernels": {}, "dense_below": {"1": true}, "cost": {}}',
        '{"format": "headscope.host-profile/1", "machine": [], "kernels": {}, "dense_below": {}, "cost": {}}',
        '{"format": "headscope.host-profile/1", "machine": {}, "kernels": {"64": 3}, "dense_below": {}, "cost": {}}',
    ],
)
def test_a_bad_host_profile_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "host.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        HostProfile.load(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_host_profile_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    old = {"format": "headscope.host-profile/1", "machine": {"gpu": "H200"}, "kernels": {"64": {"warps": 4}}}
    path.write_text(json.dumps(old | {"dense_below": {"1": 4096}, "cost": {}}))
    assert HostProfile.load(path) == HostProfile({"gpu": "H200"}, {1: 4096})
    assert "kernels" not in HostProfile.load(path).to_json()


def test_a_named_host_profile_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        HostProfile.load(tmp_path / "none.json")
