"""`headscope bench`: the kernels against torch's own attention on this machine, and whole prefills."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.engine.base.errors import OptionError
from headscope.engine.bench.shapes import SHAPES
from headscope.engine.cli import output as cli_output
from headscope.engine.cli.bench_tables import kernel_table, prefill_table, rate_table, sampling_table
from headscope.engine.cli.ending import nothing_begun
from headscope.engine.cli.options import parse_layers, parse_lengths, read_given
from headscope.engine.cli.output import bar, steps

if TYPE_CHECKING:
    import torch

    from headscope.engine.bench.layers import Report
    from headscope.engine.bench.prefill import Setting
    from headscope.engine.prompts.prompt import Prompt

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def bench(
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", help="Tokens, comma-separated; K and M are 1,024 and its square. E.g. 8K,32K,1M."),
    ] = None,
    shape: Annotated[str, typer.Option("--shape", help=f"Heads of a layer: {', '.join(SHAPES)}.")] = "llama3-8b",
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, comma-separated.")] = "1",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bf16, fp16 or fp32 (default: bf16, fp32 on a CPU).")
    ] = None,
    impl: Annotated[str, typer.Option("--impl", help="auto, gluon, triton or torch.")] = "auto",
    cases: Annotated[
        str | None, typer.Option("--cases", help="Part of the names of the sparse settings to run.")
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, help="Timed rounds; fewer where they take long.")
    ] = 5,
    flex: Annotated[
        bool, typer.Option("--flex", help="Time FlexAttention on the same tiles too (CUDA, up to 256K).")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all rows to this file.")] = None,
    host_profile: Annotated[
        bool, typer.Option("--host", help="Write the host profile: below which length this machine stays dense.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Take Q/K/V from this model on --prompt or --prompts, not random ones."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", help="A text file, sample prompt, or - (standard input); --lengths takes its beginnings."
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Layers to capture, such as 0,4-7; otherwise four.")
    ] = None,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Whole prefills with random weights, split into their parts.")
    ] = False,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", help="With --prefill: a head config (ours or MInference's) to time; may be repeated."),
    ] = None,
    timed_layers: Annotated[
        int | None,
        typer.Option(
            "--timed-layers",
            min=1,
            max=1000,
            help="With --prefill: layers that run; totals are scaled. With --search-rate: layers searched (3).",
        ),
    ] = None,
    search_rate: Annotated[
        bool, typer.Option("--search-rate", help="How fast this machine searches, on synthetic layers of --shape.")
    ] = False,
    sampling: Annotated[
        bool, typer.Option("--sampling", help="What every way to sample the index captures, on --model and --prompts.")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="With --sampling: a folder of .txt or .md files.")
    ] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option(
            "--cost-model",
            help="With --sampling: a cost-model.json of a search; adds index and kernel time at 10 % missed.",
        ),
    ] = None,
) -> None:
    """Time dense and sparse attention of one layer against SDPA (forced to cuDNN on CUDA), in one interleaved run.

    Every kernel passes a check against float64 before it is timed. On random inputs vertical-slash settings are timed
    on a fixed clustered index; "index in" adds the time of building an index of the same budget. With --model and
    --prompt the online index itself is timed on real Q/K/V, with what it misses. With --prefill whole prefills are
    timed, vertical-slash 1000/6096 in every head and each --config, dense below what the host profile says. With
    --search-rate a search of synthetic layers is timed, and its winners beside what the cost model says of them. With
    --sampling every way to sample rows is measured on --model and --prompts: the mass that its lines capture at equal
    cells, and its index time.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise OptionError(f"--dtype must be one of {', '.join(_DTYPES)}, got {dtype[:40]!r}")
    _check_modes(
        {"--prefill": prefill, "--search-rate": search_rate, "--sampling": sampling, "--host": host_profile},
        timed_layers,
        config,
    )
    if sampling and impl != "auto":
        raise OptionError("--sampling compares estimators and not implementations: leave --impl out")
    _check_sources(model, prompt, prompts, layers, sampling, prefill or search_rate or host_profile, cost_model)
    if shape not in SHAPES:
        raise OptionError(f"--shape must be one of {', '.join(SHAPES)}, got {shape[:40]!r}")
    asked = None if lengths is None else parse_lengths("--lengths", lengths)
    batches = parse_lengths("--batch", batch)
    wanted = None if layers is None else parse_layers(layers)
    cli_output.check_outputs(json=json_file, host=_host_path() if host_profile else None)
    text = None if prompt is None else read_given(prompt)
    with nothing_begun():
        import torch

        from headscope.engine.bench import layers as benching
        from headscope.engine.bench.cases import CASES
    cuda = torch.cuda.is_available()
    kind: torch.dtype = getattr(torch, _DTYPES[dtype or ("bf16" if cuda else "fp32")])
    if prefill:
        _prefill(shape, asked, kind, impl, repeats, config or [], timed_layers, json_file)
        return
    if search_rate:
        _search_rate(shape, asked, kind, impl, timed_layers or 3, json_file)
        return
    if sampling and model is not None and prompts is not None:
        _sampling(model, prompts, wanted, asked, None if dtype is None else kind, cost_model, json_file)
        return
    settings = [case for case in CASES if cases is None or cases in case.name]
    if not settings:
        raise OptionError(f"--cases {cases!r} names none of {', '.join(case.name for case in CASES)}")
    options: dict[str, Any] = {"impl": impl, "cases": settings, "repeats": repeats, "flex": flex}
    if model is not None and text is not None:
        report = _captured(model, text, wanted, asked, None if dtype is None else kind, options)
    else:
        tokens = asked or parse_lengths("--lengths", "4K,8K,12K,16K,32K,128K" if cuda else "512,1K")
        with steps("timing") as progress:
            report = benching.run(
                shape, SHAPES[shape], tokens, batches=batches, dtype=kind, progress=progress, **options
            )
    console = cli_output.out()
    console.print(kernel_table(report, console.width))
    for planted in report.planted:
        cli_output.note(
            f"planted structure at {planted['length']} tokens: the index finds {planted['columns_found']:.0%} of the "
            f"columns and {planted['distances_found']:.0%} of the distances"
        )
    if json_file is not None:
        cli_output.write_json(json_file, _finite(report.to_dict()))
    _tell_crossovers(report)
    if host_profile:
        path = benching.host_profile(report).save()
        cli_output.note(f"Wrote {path}: dense below {report.dense_below} tokens per batch size.")


def _host_path() -> Path:
    from headscope.engine.config.host import default_path

    return default_path()


def _check_modes(modes: dict[str, bool], timed_layers: int | None, config: list[Path] | None) -> None:
    """`OptionError` for two modes at once, or for an option of a mode that is not asked for."""
    asked = [name for name, on in modes.items() if on]
    if len(asked) > 1:
        raise OptionError(f"{' and '.join(asked)} measure different things: ask for one at a time")
    if config and not modes["--prefill"]:
        raise OptionError("--config goes with --prefill")
    if timed_layers is not None and not (modes["--prefill"] or modes["--search-rate"]):
        raise OptionError("--timed-layers goes with --prefill or --search-rate")


def _check_sources(
    model: str | None,
    prompt: str | None,
    prompts: Path | None,
    layers: str | None,
    sampling: bool,
    random: bool,
    cost_model: Path | None,
) -> None:
    """`OptionError` where a model and its prompts do not go together, or with what runs on `random` inputs."""
    if random and model is not None:
        raise OptionError("--prefill, --search-rate and --host run on random inputs: leave --model out")
    if sampling and (model is None or prompts is None or prompt is not None):
        raise OptionError("--sampling needs --model and --prompts, a folder, in place of --prompt")
    if not sampling and (prompts is not None or cost_model is not None):
        raise OptionError("--prompts and --cost-model go with --sampling")
    if not sampling and (model is None) != (prompt is None):
        raise OptionError("--model and --prompt go together: real captures need both")
    if layers is not None and model is None:
        raise OptionError("--layers goes with --model: it says which layers to capture")


def _captured(
    model: str,
    text: Prompt,
    layers: tuple[int, ...] | None,
    lengths: list[int] | None,
    dtype: torch.dtype | None,
    options: dict[str, Any],
) -> Report:
    """Real Q/K/V: the model prefills the prompt, or its beginnings, layer by layer."""
    from headscope.engine.bench.layers import run_captures
    from headscope.engine.config.evidence import prompt_record
    from headscope.engine.model.load import load_model
    from headscope.engine.prompts.tokens import encode

    with bar(f"loading {model}") as progress:
        loaded = load_model(model, dtype=dtype, progress=progress)
    ids = encode(loaded, text.text, template=False).ids
    facts = prompt_record(text.name, text.kind, text.sha256, int(ids.shape[1]), False)
    with steps("timing") as note:
        return run_captures(loaded, ids, lengths=lengths, layers=layers, prompt=facts, progress=note, **options)


def _prefill(
    shape: str,
    lengths: list[int] | None,
    dtype: torch.dtype,
    impl: str,
    repeats: int,
    configs: list[Path],
    timed_layers: int | None,
    json_file: Path | None,
) -> None:
    import torch

    from headscope.engine.bench import decoder as bench_decoder
    from headscope.engine.bench import prefill as bench_prefill
    from headscope.engine.config.host import HostProfile

    if shape not in bench_decoder.MODELS:
        raise OptionError(f"--prefill runs the shapes {', '.join(bench_decoder.MODELS)}, got {shape!r}")
    sizes = bench_decoder.MODELS[shape]
    settings = bench_prefill.default_settings(sizes) + tuple(_setting(path) for path in configs)
    tokens = lengths or parse_lengths("--lengths", "4K,32K,128K" if torch.cuda.is_available() else "1K")
    host = HostProfile.load()
    with steps("timing") as progress:
        report = bench_prefill.run_prefill(
            shape,
            sizes,
            tokens,
            settings,
            timed_layers=timed_layers,
            dtype=dtype,
            impl=impl,
            repeats=repeats,
            host=host,
            progress=progress,
        )
    console = cli_output.out()
    console.print(prefill_table(report, console.width))
    for row in report.rows:
        if row.note:
            cli_output.note(f"{row.length} tokens, {row.setting}: {row.note}")
    if json_file is not None:
        cli_output.write_json(json_file, _finite(report.to_dict()))


def _search_rate(
    shape: str, lengths: list[int] | None, dtype: torch.dtype, impl: str, layers: int, json_file: Path | None
) -> None:
    """A timed search of synthetic layers at every length."""
    import torch

    from headscope.engine.bench.rate import rate

    reports = []
    for tokens in lengths or parse_lengths("--lengths", "32K" if torch.cuda.is_available() else "1K"):
        with bar(f"searching {layers} layers of {tokens} tokens"):
            reports.append(rate(shape, tokens, layers, dtype, impl))
        cli_output.out().print(rate_table(reports[-1]))
    if json_file is not None:
        cli_output.write_json(json_file, _finite({"searches": reports}))


def _sampling(
    model: str,
    prompts: Path,
    layers: tuple[int, ...] | None,
    lengths: list[int] | None,
    dtype: torch.dtype | None,
    cost_model: Path | None,
    json_file: Path | None,
) -> None:
    """What every estimator captures on the prompts of a folder, cut to one length if that is given."""
    from headscope.engine.base.machine import hardware, versions
    from headscope.engine.bench.layers import a_few
    from headscope.engine.bench.sampling import MISSED, study, totals
    from headscope.engine.model.load import load_model
    from headscope.engine.prompts.sources import read_folder
    from headscope.engine.search.cost import CostModel
    from headscope.engine.search.source import ModelSource, encode_prompts

    if lengths is not None and len(lengths) > 1:
        raise OptionError("--sampling cuts its prompts to one length: give a single one with --lengths")
    texts = read_folder(prompts)
    cost = None if cost_model is None else CostModel.load(cost_model)
    with bar(f"loading {model}") as progress:
        loaded = load_model(model, dtype=dtype, progress=progress)
    source = ModelSource(loaded)
    calibration = encode_prompts(loaded, texts, None if lengths is None else lengths[0], template=False)
    measured = source.layers(layers) if layers is not None else a_few(source.layers(None))
    with bar(f"sampling {len(calibration)} prompts"):
        points = study(source, calibration, measured)
    tokens = sum(len(prompt.ids) for prompt in calibration) // len(calibration)
    whole = [] if cost is None else totals(points, MISSED, cost, tokens, loaded.facts.query_heads)
    cli_output.out().print(sampling_table(points, whole))
    if json_file is not None:
        report = {
            "model": loaded.facts.to_dict(),
            "prompts": [prompt.to_dict() for prompt in calibration],
            "layers": list(measured),
            "hardware": hardware(loaded.device),
            "versions": versions(),
            "points": [point.to_dict() for point in points],
            "totals": [total.to_dict() for total in whole],
        }
        cli_output.write_json(json_file, _finite(report))


def _setting(path: Path) -> Setting:
    """A head config file, ours or MInference's, as a setting."""
    from headscope.engine.base import files
    from headscope.engine.bench.prefill import Setting
    from headscope.engine.config import interop
    from headscope.engine.config.file import HeadConfig

    value = files.read_json(path)
    ours = interop.detect(value, str(path)) == "headscope"
    config = (
        HeadConfig.from_dict(value, str(path)) if ours else interop.import_foreign(value, "minference", name=path.name)
    )
    patterns = tuple(config.patterns(layer) for layer in range(len(config.heads)))
    return Setting(path.stem[:40], patterns, config.estimator)


def _tell_crossovers(report: Report) -> None:
    for name, below in report.crossovers.items():
        for size, tokens in below.items():
            timed = (r.length for r in report.rows if r.batch == size and r.name == name and r.with_index is not None)
            longest = max(timed)
            never = f"{name} did not win up to {longest} tokens"
            text = never if tokens > longest else f"{name} wins from {tokens} tokens, index included"
            cli_output.note(f"batch {size}: {text}")


def _finite(value: Any) -> Any:
    """The same value with null for what JSON cannot say."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
