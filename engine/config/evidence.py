"""What justified a head's pattern, and where a config comes from: one set of names for every writer.

`inspect --save`, `search` and the studio write the same fields. Older files used some other names for the same
things (`prompt_sha256` or `worst_prompt`, `made`, `template`); `read_evidence` and `read_provenance` give those under
the names of today, and nothing rewrites the file.

Provenance, beside a writer's own fields (a search's candidates and target, a draft's edits):

    created     when, ISO 8601 with its time zone
    made_by     search, by hand in the studio, a starting point
    versions    of headscope and of what computes for it
    hardware    the machine's processor or GPU in words
    device      cpu or cuda:0, where it is known
    dtype       of the model, such as bfloat16, where it is known
    prompts     one entry a prompt: name, kind, sha256 of the text, tokens, chat_template (and a search's key)
    prompt_set  the same prompts in one hash; see `prompt_set`
    lengths     tokens of the prompts, ascending, each once
    metric      what was measured, and whether isolated or in situ
    parent      the config that this one was made from, or None
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from headscope.engine.base.errors import ModelError
from headscope.engine.base.machine import versions

if TYPE_CHECKING:
    from headscope.engine.loss.measure import HeadMeasurement

LossKind = Literal["isolated", "in situ"]

_OLD_EVIDENCE = {"prompt_sha256": "prompt", "worst_prompt": "prompt"}
_OLD_PROVENANCE = {"made": "made_by"}
_OLD_PROMPT = {"template": "chat_template"}


@dataclass(frozen=True)
class Evidence:
    """What was measured of one head under its pattern, as measured and not rounded.

    Masses, density and output error are shares as in `HeadMeasurement`; `missed_mass_thirds` are those of the first,
    middle and last third of the rows. `time_share_ms` is the head's share of its layer, of a search what its cost
    model expects. `loss` says whether the layers before were dense (isolated) or sparse (in situ). `prompt` is the
    sha256 of the text that the figures are of; over several prompts that is the one that loses most, but
    `missed_mass_worst` is the worst row of all. `run` names the studio's run.
    """

    missed_mass_mean: float
    missed_mass_worst: float
    missed_mass_p99: float
    missed_mass_thirds: tuple[float, float, float]
    output_error: float
    computed_density: float
    computed_pairs: int
    time_share_ms: float
    tokens: int
    loss: LossKind
    prompt: str
    prompt_set: str
    run: str | None = None

    def __post_init__(self) -> None:
        values = (
            self.missed_mass_mean,
            self.missed_mass_worst,
            self.missed_mass_p99,
            *self.missed_mass_thirds,
            self.output_error,
            self.computed_density,
            self.time_share_ms,
        )
        if not all(math.isfinite(value) for value in values):
            raise ModelError(
                "a head's measurements are not finite, so they are no evidence: measure again in bfloat16 or float32"
            )

    @classmethod
    def of(
        cls,
        head: HeadMeasurement,
        prompt: Mapping[str, Any],
        loss: LossKind = "isolated",
        run: str | None = None,
    ) -> Evidence:
        """A measurement on one prompt (see `prompt_record`)."""
        return cls(
            missed_mass_mean=head.missed_mass_mean,
            missed_mass_worst=head.missed_mass_worst,
            missed_mass_p99=head.missed_mass_p99,
            missed_mass_thirds=head.missed_mass_thirds,
            output_error=head.output_error,
            computed_density=head.computed_density,
            computed_pairs=head.computed_pairs,
            time_share_ms=head.time_share_ms,
            tokens=int(prompt["tokens"]),
            loss=loss,
            prompt=str(prompt["sha256"]),
            prompt_set=prompt_set([prompt]),
            run=run,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `run` only where there is one."""
        value = asdict(self) | {"missed_mass_thirds": list(self.missed_mass_thirds)}
        if self.run is None:
            del value["run"]
        return value


def prompt_record(name: str, kind: str, sha256: str, tokens: int, chat_template: bool) -> dict[str, Any]:
    """What provenance and reports keep of a prompt; never its text."""
    return {"name": name, "kind": kind, "sha256": sha256, "tokens": tokens, "chat_template": chat_template}


def prompt_set(prompts: Iterable[Mapping[str, Any]]) -> str:
    """One hash for a set of prompts: sha256 over their texts' hashes and lengths in tokens, in any order."""
    lines = sorted(f"{prompt['sha256']} {prompt['tokens']}\n" for prompt in prompts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def provenance(
    made_by: str,
    *,
    hardware: str,
    prompts: Sequence[Mapping[str, Any]],
    metric: str,
    device: str | None = None,
    dtype: str | None = None,
    parent: str | None = None,
    versions_then: Mapping[str, str] | None = None,
    **own: Any,
) -> dict[str, Any]:
    """The fields of the module's table, then the writer's `own`. `versions_then` are those of an earlier run."""
    where = {name: value for name, value in (("device", device), ("dtype", dtype)) if value is not None}
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "made_by": made_by,
        "versions": dict(versions_then or versions()),
        "hardware": hardware,
        **where,
        "prompts": [dict(prompt) for prompt in prompts],
        "prompt_set": prompt_set(prompts),
        "lengths": sorted({int(prompt["tokens"]) for prompt in prompts}),
        "metric": metric,
        "parent": parent,
        **own,
    }


def read_evidence(evidence: Mapping[str, Any] | None) -> dict[str, Any]:
    """A head's evidence under the names of today; empty where there is none."""
    return _renamed(evidence or {}, _OLD_EVIDENCE)


def read_provenance(value: Mapping[str, Any]) -> dict[str, Any]:
    """A config's provenance under the names of today, whichever version wrote it."""
    current = _renamed(value, _OLD_PROVENANCE)
    prompts = current.get("prompts")
    if isinstance(prompts, list):
        current["prompts"] = [_renamed(each, _OLD_PROMPT) if isinstance(each, Mapping) else each for each in prompts]
    of_run = current.get("versions")
    if "hardware" not in current and isinstance(of_run, Mapping) and "hardware" in of_run:
        current["hardware"] = of_run["hardware"]
        current["versions"] = {name: each for name, each in of_run.items() if name != "hardware"}
    return current


def _renamed(value: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name) if names.get(name) not in value else name: each for name, each in value.items()}
