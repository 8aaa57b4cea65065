"""Finds four heads of a model to look at: the clearest of each pattern, and one that should stay dense.

Every head is measured under the three patterns at equal cells, on two prompts. Block-sparse sets the number of
cells (its blocks are the coarsest), then the A-shape's window and the budgets of vertical-slash are widened as
far as they stay within it. Tiles are left out (`tile=1`): the question is the shape, not the kernel.

    python -m headscope.studio.lessons.maths.find_heads --out heads.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headscope.engine import build_index
from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.loss import measure
from headscope.engine.model.load import LoadedModel, load_model
from headscope.engine.patterns.families import AShape, BlockSparse, Pattern, VerticalSlash, from_dict
from headscope.engine.prompts.sources import read_prompt
from headscope.engine.prompts.tokens import encode
from headscope.engine.runs import capture

FORMAT = "headscope.lesson-heads/1"
FILE = Path(__file__).with_name("heads.json")
PROMPTS = ("code", "prose")
TOKENS = 1024
BLOCK = BlockSparse(blocks=6, block_size=16)
SINK = 4
FAMILIES = ("a-shape", "vertical-slash", "block-sparse")
GOOD = (0.15, 0.4)
"""A head counts as clear for a pattern that misses at most this much of it; the second limit if none leads below it."""


@dataclass(frozen=True)
class Trial:
    """One head under one pattern on one prompt: cells used, and the mass and output that went missing."""

    pattern: Pattern
    cells: int
    missed: float
    worst: float
    output_error: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `trial_from_dict` turns it back."""
        entry = {name: value for name, value in asdict(self).items() if name != "pattern"}
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in entry.items()}
        return {**self.pattern.to_dict(), **rounded}


def trial_from_dict(entry: dict[str, Any]) -> Trial:
    """The trial that `to_dict` wrote."""
    own = {"cells", "missed", "worst", "output_error"}
    pattern = from_dict({name: value for name, value in entry.items() if name not in own})
    return Trial(pattern, **{name: entry[name] for name in own})


def prompt_ids(loaded: LoadedModel, name: str, tokens: int = TOKENS) -> torch.Tensor:
    """The first `tokens` token ids of a sample prompt, [1, tokens]."""
    return encode(loaded, read_prompt(name).text, False, most=tokens).ids


def equal_cells(q: torch.Tensor, k: torch.Tensor, scale: float) -> dict[str, list[Pattern]]:
    """Three patterns for each head of a layer, no wider than the block pattern. q [1, Hq, n, D], k [1, Hkv, n, D]."""
    heads, length = q.shape[1], q.shape[2]

    def cells(patterns: Sequence[Pattern]) -> list[int]:
        return build_index(q, k, patterns, scale, tile=1).requested_pairs()[0].tolist()

    target = cells([BLOCK] * heads)[0]
    return {
        "a-shape": _widest(lambda width: AShape(SINK, width), cells, heads, length, target),
        "vertical-slash": _widest(lambda width: VerticalSlash(width, width), cells, heads, length, target),
        "block-sparse": [BLOCK] * heads,
    }


def _widest(
    family: Callable[[int], Pattern],
    cells: Callable[[Sequence[Pattern]], list[int]],
    heads: int,
    most: int,
    target: int,
) -> list[Pattern]:
    """Per head the widest member of a family with at most `target` cells, by halving."""
    low, high = [1] * heads, [most] * heads
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b + 1) // 2 for a, b in zip(low, high, strict=True)]
        counts = cells([family(width) for width in middle])
        for head, count in enumerate(counts):
            if count <= target:
                low[head] = middle[head]
            else:
                high[head] = middle[head] - 1
    return [family(width) for width in low]


def try_layer(inputs: LayerInputs, patterns: dict[str, list[Pattern]] | None = None) -> list[dict[str, Trial]]:
    """Every head of a layer under the three patterns: one dict a head."""
    compared = equal_cells(inputs.q, inputs.k, inputs.scale) if patterns is None else patterns
    dense = measure.dense_pass(inputs)
    trials: list[dict[str, Trial]] = [{} for _ in range(inputs.query_heads)]
    for kind, of_heads in compared.items():
        for one in measure.measure_patterns(inputs, of_heads, tile=1, dense=dense).heads:
            trials[one.head][kind] = Trial(
                one.pattern, one.computed_pairs, one.missed_mass_mean, one.missed_mass_worst, one.output_error
            )
    return trials


def try_model(loaded: LoadedModel, prompt: str) -> dict[tuple[int, int], dict[str, Trial]]:
    """Every head of a model on one prompt, by (layer, head)."""
    by_head: dict[tuple[int, int], dict[str, Trial]] = {}

    def visit(layer: int, inputs: LayerInputs) -> None:
        for head, trials in enumerate(try_layer(inputs)):
            by_head[layer, head] = trials

    capture.stream(loaded, prompt_ids(loaded, prompt), visit, logits=False)
    return by_head


def choose(trials: dict[str, dict[tuple[int, int], dict[str, Trial]]]) -> dict[str, tuple[int, int]]:
    """The clearest head of each family over all prompts, and the one that no family serves.

    Clear: the family misses at most `GOOD`, and the other two miss the most beyond it (the nearer of the two counts).
    The diffuse one: its best family misses the most.
    """
    heads = list(next(iter(trials.values())))

    def missed(place: tuple[int, int], kind: str) -> float:
        return sum(of[place][kind].missed for of in trials.values()) / len(trials)

    def lead(place: tuple[int, int], kind: str) -> float:
        return min(missed(place, other) for other in FAMILIES if other != kind) - missed(place, kind)

    examples: dict[str, tuple[int, int]] = {}
    for kind in FAMILIES:
        examples[kind] = heads[0]
        for limit in GOOD:
            clear = [place for place in heads if missed(place, kind) <= limit] or heads
            examples[kind] = max(clear, key=partial(lead, kind=kind))
            if lead(examples[kind], kind) > 0:
                break
    examples["dense"] = max(heads, key=lambda place: min(missed(place, kind) for kind in FAMILIES))
    return examples


def document(loaded: LoadedModel, trials: dict[str, dict[tuple[int, int], dict[str, Trial]]]) -> dict[str, Any]:
    """The file that the chapter reads: which heads, and what was measured of them."""
    examples = choose(trials)
    first = next(iter(trials.values()))
    return {
        "format": FORMAT,
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "tokens": TOKENS,
        "prompts": list(trials),
        "heads_measured": len(first),
        "tile": 1,
        "heads": [
            {
                "role": role,
                "layer": layer,
                "head": head,
                "evidence": {
                    prompt: {kind: trial.to_dict() for kind, trial in of[layer, head].items()}
                    for prompt, of in trials.items()
                },
            }
            for role, (layer, head) in examples.items()
        ],
    }


def main() -> int:
    """Measures every head and writes the file."""
    parser = argparse.ArgumentParser(description="Find four heads for the learn page by measuring all of them.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, device="cpu")
    trials = {prompt: try_model(loaded, prompt) for prompt in PROMPTS}
    arguments.out.write_text(json.dumps(document(loaded, trials), indent=1) + "\n", encoding="utf-8")
    for entry in json.loads(arguments.out.read_text())["heads"]:
        missed = {k: t["missed"] for k, t in entry["evidence"][PROMPTS[0]].items()}
        print(f"{entry['role']}: layer {entry['layer']} head {entry['head']}, misses on {PROMPTS[0]}: {missed}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
