"""Sparse against dense on the whole model: logits, continuation, retrieval, and where along the layers error enters.

Isolated losses say what a head misses; this says what the model's answers lose. Both models are the same weights,
one of them under a head config. Tasks on which the dense model itself scores under 50 % are marked uninformative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from headscope.engine.attend.finite import not_finite
from headscope.engine.base.errors import Cancelled, ModelError
from headscope.engine.base.progress import Cancel, NamedProgress
from headscope.engine.config.facts import text_config
from headscope.engine.config.file import HeadConfig
from headscope.engine.model.apply import apply
from headscope.engine.patterns.families import Dense
from headscope.engine.prompts.retrieval import KINDS, RetrievalPrompt, is_answer, retrieval_grid
from headscope.engine.prompts.tokens import check_ids, counter
from headscope.engine.runs.answer import answer

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel

_ROWS = 256
"""Rows whose logits are formed at a time: 256 x 128K in float32 is 128 MiB."""

ANSWER_TOKENS = 16
INFORMATIVE = 0.5


@dataclass(frozen=True)
class Quality:
    """Logits of one prompt, dense against sparse. KL in nats, dense to sparse; agreement is of the top token.

    `kl_last` is that of the last position, whose logits give the first answer token.
    """

    prompt: str
    tokens: int
    perplexity_dense: float
    perplexity_sparse: float
    kl_mean: float
    kl_worst: float
    kl_last: float
    top1_agreement: float

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.01 means that sparse perplexity is 1 % higher."""
        return self.perplexity_sparse / self.perplexity_dense - 1


@dataclass(frozen=True)
class RetrievalCell:
    """One length and depth of one task: shares of right answers over `prompts` prompts."""

    kind: str
    tokens: int
    depth: float
    prompts: int
    dense: float
    sparse: float


@dataclass(frozen=True)
class RetrievalTask:
    """One task at one length over all depths. Uninformative when dense scores under 50 %."""

    kind: str
    tokens: int
    dense: float
    sparse: float
    informative: bool


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens after a prompt: how many of `tokens` agree before the first difference."""

    prompt: str
    tokens: int
    agree: int


@dataclass(frozen=True)
class LayerEffect:
    """What sparse attention in `layers` alone does to the logits (`how` is "alone" or "first layers")."""

    how: str
    layer: int
    kl_mean: float
    kl_last: float
    top1_agreement: float


def hidden_states(loaded: LoadedModel, ids: torch.Tensor, config: HeadConfig | None) -> torch.Tensor:
    """Last hidden states [S, width] of a prompt, dense or under a config."""
    ids = check_ids(loaded, ids).to(loaded.device)
    decoder = loaded.model.get_decoder()
    with torch.no_grad():
        if config is None:
            return decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        with apply(loaded, config):
            return decoder(input_ids=ids, use_cache=False).last_hidden_state[0]


def check_head(loaded: LoadedModel, ids: torch.Tensor, hidden: torch.Tensor) -> None:
    """ModelError if the logits are not finite, or not just what the output layer (and a soft cap) makes of `hidden`."""
    with torch.no_grad():
        own = (
            loaded.model(input_ids=check_ids(loaded, ids).to(loaded.device), use_cache=False, logits_to_keep=1)
            .logits[0, -1]
            .float()
        )
    if not math.isfinite(float(own.max())):
        raise not_finite("the logits of the last position", loaded.dtype)
    ours = _logits(loaded, hidden[-1:])[0]
    if not torch.allclose(own, ours, rtol=2e-2, atol=2e-2 * float(own.abs().max())):
        raise ModelError(f"{loaded.name} changes its logits after the output layer in a way that is not served here.")


def _logits(loaded: LoadedModel, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = loaded.model.get_output_embeddings()(hidden).float()
    cap = getattr(text_config(loaded.model), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def compare(
    loaded: LoadedModel, ids: torch.Tensor, dense: torch.Tensor, sparse: torch.Tensor, name: str = "prompt"
) -> Quality:
    """Logits of two sets of hidden states, a few rows at a time."""
    tokens = torch.as_tensor(ids).reshape(-1).to(dense.device)
    losses, kls, same = [], [], 0
    for row in range(0, len(tokens), _ROWS):
        a = _logits(loaded, dense[row : row + _ROWS]).log_softmax(-1)
        b = _logits(loaded, sparse[row : row + _ROWS]).log_softmax(-1)
        kls.append(_checked((a.exp() * (a - b)).sum(-1), row, loaded.dtype).clamp(min=0.0).double())
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        following = tokens[row + 1 : row + 1 + len(a)]
        at = torch.arange(len(following), device=a.device)
        losses.append(torch.stack([-a[at, following], -b[at, following]]).double())
    kl = torch.cat(kls)
    nll = torch.cat(losses, 1).mean(1) if len(tokens) > 1 else torch.zeros(2)
    return Quality(
        prompt=name,
        tokens=len(tokens),
        perplexity_dense=_perplexity(float(nll[0]), name, loaded.dtype),
        perplexity_sparse=_perplexity(float(nll[1]), name, loaded.dtype),
        kl_mean=float(kl.mean()),
        kl_worst=float(kl.max()),
        kl_last=float(kl[-1]),
        top1_agreement=same / len(tokens),
    )


def _perplexity(nll: float, prompt: str, dtype: torch.dtype) -> float:
    """From the mean negative log-likelihood in nats; ModelError where a float64 does not hold it."""
    try:
        value = math.exp(nll)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise not_finite(f"the probabilities of the tokens of {prompt}", dtype)
    return value


def _checked(kl: torch.Tensor, first: int, dtype: torch.dtype) -> torch.Tensor:
    """KL of rows [rows] from position `first` on; ModelError names the first that is not finite."""
    bad = (~torch.isfinite(kl)).nonzero()
    if len(bad):
        raise not_finite(f"the logits at position {first + int(bad[0])}", dtype)
    return kl


def quality(loaded: LoadedModel, ids: torch.Tensor, config: HeadConfig, name: str = "prompt") -> Quality:
    """Perplexity, KL and top-1 agreement of one prompt under a config."""
    dense = hidden_states(loaded, ids, None)
    check_head(loaded, ids, dense)
    return compare(loaded, ids, dense, hidden_states(loaded, ids, config), name)


def continuation(
    loaded: LoadedModel, ids: torch.Tensor, config: HeadConfig, name: str = "prompt", tokens: int = 32
) -> Continuation:
    """How long the greedy continuations agree."""
    dense, sparse = (
        answer(loaded, ids, which, max_new_tokens=tokens, warm_up=False).token_ids for which in (None, config)
    )
    most = max(len(dense), len(sparse))
    agree = next(
        (n for n, (a, b) in enumerate(zip(dense, sparse, strict=False)) if a != b), min(len(dense), len(sparse))
    )
    return Continuation(name, most, most if dense == sparse else agree)


def retrieval(
    loaded: LoadedModel,
    config: HeadConfig,
    *,
    kinds: Iterable[str] = KINDS,
    lengths: Iterable[int] = (512, 1024, 2000),
    depths: Iterable[float] = (0.1, 0.5, 0.9),
    seeds: Iterable[int] = (0, 1),
    progress: NamedProgress | None = None,
    cancel: Cancel | None = None,
) -> tuple[list[RetrievalCell], list[RetrievalTask]]:
    """The ladder: every kind, length and depth, dense and sparse on the same prompts."""
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.name} has no tokenizer, so it cannot be asked anything.")
    count = counter(loaded)
    kind_list, length_list, depth_list, seed_list = list(kinds), sorted(set(lengths)), list(depths), list(seeds)
    total = len(kind_list) * len(length_list) * len(depth_list) * len(seed_list)
    right: dict[tuple[str, int, float], list[tuple[bool, bool]]] = {}
    at = 0
    for length in length_list:
        for prompt in retrieval_grid(kind_list, [length], depth_list, seed_list, encode=count):
            _check(cancel)
            ids = torch.tensor([list(count(prompt.text))])
            answers = [_right(loaded, prompt, ids, which) for which in (None, config)]
            right.setdefault((prompt.kind, length, prompt.depth), []).append((answers[0], answers[1]))
            at += 1
            if progress is not None:
                progress(at, total, f"{prompt.kind} at {length} tokens")
    cells = [
        RetrievalCell(kind, length, depth, len(answered), _share(answered, 0), _share(answered, 1))
        for (kind, length, depth), answered in sorted(right.items())
    ]
    tasks = []
    for kind in kind_list:
        for length in length_list:
            answered = [pair for key, pairs in sorted(right.items()) if key[:2] == (kind, length) for pair in pairs]
            dense = _share(answered, 0)
            tasks.append(RetrievalTask(kind, length, dense, _share(answered, 1), dense >= INFORMATIVE))
    return cells, tasks


def _right(loaded: LoadedModel, prompt: RetrievalPrompt, ids: torch.Tensor, config: HeadConfig | None) -> bool:
    return is_answer(prompt.expected, answer(loaded, ids, config, max_new_tokens=ANSWER_TOKENS, warm_up=False).text)


def _share(pairs: Sequence[tuple[bool, bool]], side: int) -> float:
    return sum(pair[side] for pair in pairs) / max(1, len(pairs))


def only_layers(config: HeadConfig, layers: Iterable[int]) -> HeadConfig:
    """The config with every other layer dense."""
    kept = set(layers)
    others = [(layer, row) for layer, row in enumerate(config.heads) if layer not in kept]
    return config.with_heads({(layer, head): Dense() for layer, row in others for head in range(len(row))})


def by_layer(
    loaded: LoadedModel,
    ids: torch.Tensor,
    config: HeadConfig,
    *,
    layers: Iterable[int] | None = None,
    how: Sequence[str] = ("alone", "first layers"),
    progress: NamedProgress | None = None,
    cancel: Cancel | None = None,
) -> list[LayerEffect]:
    """The effect on the logits of each layer alone, and of the first k layers, to show where error enters and grows."""
    picked = list(range(len(config.heads))) if layers is None else sorted(set(layers))
    dense = hidden_states(loaded, ids, None)
    check_head(loaded, ids, dense)
    effects = []
    for mode in how:
        for layer in picked:
            _check(cancel)
            which = [layer] if mode == "alone" else range(layer + 1)
            alone = compare(loaded, ids, dense, hidden_states(loaded, ids, only_layers(config, which)))
            effects.append(LayerEffect(mode, layer, alone.kl_mean, alone.kl_last, alone.top1_agreement))
            if progress is not None:
                progress(len(effects), len(picked) * len(how), f"layer {layer} {mode}")
    return effects


def layer_weights(
    loaded: LoadedModel, ids: torch.Tensor, config: HeadConfig, layers: Sequence[int], losses: Sequence[float]
) -> tuple[float, ...]:
    """How much KL of the logits a unit of missed mass costs in each layer, scaled to a mean of 1.

    `config` is some sparse config and `losses` the mean missed mass of each of `layers` under it. ModelError names the
    first layer whose loss is not finite.
    """
    for layer, loss in zip(layers, losses, strict=True):
        if not math.isfinite(loss):
            raise ModelError(f"the loss of layer {layer} is not finite: measure it again in bfloat16 or float32")
    effects = by_layer(loaded, ids, config, layers=layers, how=("alone",))
    raw = [effect.kl_mean / max(loss, 1e-4) for effect, loss in zip(effects, losses, strict=True)]
    mean = sum(raw) / len(raw)
    return tuple(value / mean if mean > 0 else 1.0 for value in raw)


def report(
    qualities: Sequence[Quality],
    continuations: Sequence[Continuation] = (),
    cells: Sequence[RetrievalCell] = (),
    tasks: Sequence[RetrievalTask] = (),
    effects: Sequence[LayerEffect] = (),
) -> dict[str, Any]:
    """Everything JSON-ready, with the figures that a gate looks at."""
    informative = [task for task in tasks if task.informative]
    return {
        "quality": [asdict(each) | {"perplexity_change": each.perplexity_change} for each in qualities],
        "continuation": [asdict(each) for each in continuations],
        "retrieval": [asdict(cell) for cell in cells],
        "tasks": [asdict(task) for task in tasks],
        "layers": [asdict(effect) for effect in effects],
        "worst_perplexity_change": max((each.perplexity_change for each in qualities), default=None),
        "retrieval_dense": _mean([task.dense for task in informative]),
        "retrieval_sparse": _mean([task.sparse for task in informative]),
        "uninformative": [f"{task.kind} at {task.tokens}" for task in tasks if not task.informative],
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _check(cancel: Cancel | None) -> None:
    if cancel is not None and cancel():
        raise Cancelled("The evaluation was cancelled; nothing of it was kept.")
