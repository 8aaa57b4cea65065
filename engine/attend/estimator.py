"""How the online index looks at an input: which rows it samples and how it sums them up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_CHOICES = {
    "where": ("tail", "spread", "half"),
    "statistic": ("probability", "logit"),
    "columns": ("sum", "max"),
    "slashes": ("sum", "mean", "shrunk"),
    "overlap": ("keep", "removed"),
}


@dataclass(frozen=True)
class Estimator:
    """Settings of the estimate behind vertical-slash heads.

    `rows` query rows are sampled: the last ones (`tail`), evenly spread ones (`spread`), or half and half.
    Their softmax probabilities (or their logits above the row's mean, `logit`) are added up per column (`sum`
    or `max`) and per distance (`sum`, `mean` over the sampled pairs of that distance, or `shrunk`: a mean drawn
    towards zero where pairs are few). With `overlap="removed"` the chosen columns are taken out before the
    distances are added up, so that one strong column is not paid for twice.
    """

    rows: int = 64
    where: str = "tail"
    statistic: str = "probability"
    columns: str = "sum"
    slashes: str = "sum"
    overlap: str = "keep"

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or not 1 <= self.rows <= 4096:
            raise ValueError(f"Estimator.rows must be between 1 and 4096, got {str(self.rows)[:40]}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"Estimator.{name} must be one of {', '.join(allowed)}, got {str(getattr(self, name))[:40]!r}"
                )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, entry: Any) -> Estimator:
        """The estimator that `to_dict` wrote; `ValueError` names the field that does not fit."""
        if not isinstance(entry, dict):
            raise ValueError(f"estimator must be an object, got {type(entry).__name__}")
        unknown = sorted(set(entry) - {"rows", *_CHOICES})
        if unknown:
            raise ValueError(f"estimator has no field {unknown[0][:40]!r}")
        return cls(**entry)
