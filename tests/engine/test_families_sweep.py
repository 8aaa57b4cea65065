"""Every causal-LM type of transformers that builds tiny: served right, left alone rightly, or refused in one sentence.

`HEADSCOPE_FAMILIES_TABLE=FILE` makes the last test write what became of each type, as the table in engine/README.md.
"""

from __future__ import annotations

import os
from collections import defaultdict
from itertools import groupby
from pathlib import Path

import pytest
import torch

from tests.helpers.family_sweep import Outcome, sweep
from tests.helpers.tiny_families import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

BASES = ("sdpa", "eager")

NOT_BUILT = {
    "blt": "one byte-level step takes half a minute even when tiny",
    "dbrx": "its default config lacks the RoPE base that its model reads",
    "dory": "its layer counts must agree in four places",
    "dots3_note": "its head sizes must agree in three places",
    "dots3_note_text": "its head sizes must agree in three places",
    "gemma3n": "needs timm",
    "gemma3n_text": "shares caches between layers that a tiny model does not have",
    "gemma4_assistant": "drafts for another model only",
    "gemma4_unified_assistant": "drafts for another model only",
    "hrm_text": "counts its cached layers twice",
    "longcat_flash": "its head sizes must agree in three places",
    "musicgen": "has no text config of its own",
    "musicgen_melody": "has no text config of its own",
    "qwen4_exp": "its default config lacks the sizes of its sparse layers",
    "qwen4_exp_text": "its default config lacks the sizes of its sparse layers",
    "reformer": "is no decoder by default",
    "xlstm": "its default sizes depend on each other",
    "zamba2": "numbers its shared blocks in a way that a tiny model does not have",
    "xmod": "needs a language to be set",
}
"""Types whose stock model cannot be built or run tiny from its default config, with the reason."""

LEFT_ALONE = {
    "axk2",
    "bert",
    "bert-generation",
    "bigbird_pegasus",
    "camembert",
    "data2vec-text",
    "deepseek_v32",
    "deepseek_v4",
    "doge",
    "electra",
    "ernie",
    "flint",
    "gemma2",
    "gemma4_unified",
    "glm_moe_dsa",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "hy_v4",
    "inkling2_loop_text",
    "inkling2_text",
    "inkling_text",
    "ministral",
    "mistral",
    "moshi",
    "recurrent_gemma",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "vaultgemma",
    "xlm-roberta",
    "xlm-roberta-xl",
}
"""Types in which no layer is plain causal attention, by their default configs."""

REFUSED = {
    "big_bird",
    "bloom",
    "cpmant",
    "falcon",
    "falcon_mamba",
    "git",
    "gpt_neo",
    "gpt_neox_japanese",
    "mamba",
    "mamba2",
    "megatron-bert",
    "mpt",
    "mvp",
    "openai-gpt",
    "prophetnet",
    "rembert",
    "roformer",
    "rwkv",
    "trocr",
    "xglm",
    "xlm",
    "xlnet",
    "zamba",
}
"""Types whose attention cannot be replaced; `apply` says so."""

OUTCOMES: dict[str, dict[str, Outcome]] = defaultdict(dict)


def types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", types())
def test_type(name: str, base: str) -> None:
    from transformers import CONFIG_MAPPING

    if name in NOT_BUILT:
        pytest.skip(NOT_BUILT[name])
    torch.set_num_threads(1)
    try:
        model = tiny_model(CONFIG_MAPPING[name], base)
    except ValueError as error:
        if base == "sdpa" and "scaled_dot_product_attention" in str(error):
            pytest.skip("has no SDPA attention")
        raise
    outcome = sweep(model, base)
    OUTCOMES[name][base] = outcome
    expected = "refused" if name in REFUSED else "left alone" if name in LEFT_ALONE else "served"
    assert (expected == "refused") == bool(outcome.refused), outcome
    assert (expected == "served") == bool(outcome.served), outcome


def test_write_the_table() -> None:
    target = os.environ.get("HEADSCOPE_FAMILIES_TABLE")
    if not target:
        pytest.skip("HEADSCOPE_FAMILIES_TABLE names no file")
    Path(target).write_text(table(), encoding="utf-8")


def table() -> str:
    """Markdown: types with one outcome share a row; served, partly served, left alone, refused, not built."""
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in types():
        if name in NOT_BUILT:
            rows["not tried", NOT_BUILT[name]].append(name)
            continue
        outcomes = OUTCOMES[name]
        outcome = outcomes.get("sdpa") or outcomes.get("eager")
        if outcome is None:
            continue
        rows[_described(outcome)].append(name)
    order = ("served", "partly served", "left alone", "refused", "not tried")
    lines = ["| outcome | types | why |", "| --- | --- | --- |"]
    for (what, why), names in sorted(rows.items(), key=lambda row: (order.index(row[0][0]), -len(row[1]))):
        lines.append(f"| {what} | {', '.join(names)} | {why} |")
    note = "Each type by its default config: those that slide only by a setting (mistral) are served where it is off."
    return "\n".join(lines) + f"\n\n{note}\n"


def _described(outcome: Outcome) -> tuple[str, str]:
    if outcome.refused:
        return "refused", _without_class(outcome.refused)
    reasons = sorted(set((outcome.left or {}).values()))
    if len(outcome.served) < outcome.layers and not reasons:
        reasons = ["layers without attention"]
    elif outcome.served and len(outcome.served) + len(outcome.left or {}) < outcome.layers:
        reasons.append("layers without attention")
    if not outcome.served:
        return "left alone", "; ".join(reasons)
    return ("partly served", "; ".join(reasons)) if reasons else ("served", "every layer")


def _without_class(sentence: str) -> str:
    words = [list(group) for _, group in groupby(sentence.split(), key=lambda word: "For" in word or "LMHead" in word)]
    return " ".join("it" if "For" in group[0] or "LMHead" in group[0] else " ".join(group) for group in words)
