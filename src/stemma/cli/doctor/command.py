"""The command: gather, print as text or JSON, and fail if the settings can't work."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.markup import escape

from stemma.cli.options import with_settings_flags
from stemma.config.folders import cache_folder
from stemma.config.loading import load_settings
from stemma.config.settings import Settings
from stemma.config.sizes import format_size
from stemma.errors import ConfigError

if TYPE_CHECKING:
    from stemma.cli.doctor.machine import Gpu, Memory, Processor, Threads
    from stemma.cli.doctor.model import NamedModel
    from stemma.cli.doctor.server import RunningServer
    from stemma.cli.doctor.storage import Tiers
    from stemma.memory.tiers.disk.folder import Folder
    from stemma.native.library import KernelReport

EXIT_PROBLEMS = 1


@dataclass(frozen=True, slots=True)
class DemoStatus:
    """Whether the model named ``demo`` is the real one on this machine."""

    missing_packages: tuple[str, ...]
    checkpoint: str | None
    """The converted checkpoint; None: not converted yet, or it can't be."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that `stemma doctor` says."""

    versions: dict[str, str]
    processor: Processor
    kernels: KernelReport
    threads: Threads
    memory: Memory
    gpu: Gpu
    cache_folder: Folder
    tiers: Tiers
    demo: DemoStatus
    model: NamedModel | None
    """None: none was named."""
    problems: list[str]
    """Reasons why the settings can't work, one line each."""


@with_settings_flags
def command(
    config: Annotated[Path | None, typer.Option("--config", help="The server's configuration file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **flags: Any,
) -> None:
    """Print what a bug report needs: kernels, memory, versions, tiers; of a URL, what that server says."""
    console = Console(soft_wrap=True, highlight=False)
    report: Report | RunningServer
    with console.status("looking"):
        if (url := _url(flags.get("model"))) is not None:
            from stemma.cli.doctor.server import examine_server

            report = examine_server(url)
            lines = described(report.rows(), report.problems)
        else:
            report = gather(*_settings(config, flags))
            lines = describe(report)
    if as_json:
        typer.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2, default=str))
    else:
        for line in lines:
            console.print(line)
    if report.problems:
        raise typer.Exit(EXIT_PROBLEMS)


def gather(settings: Settings, names_model: bool) -> Report:
    """Examine the machine, and the model if the settings name one.

    Raises ConfigError if the settings ask for kernels that it can't run.
    """
    from stemma.cli.doctor import machine, storage
    from stemma.cli.doctor.model import examine_model
    from stemma.memory.tiers.disk.folder import examine_folder
    from stemma.model.load.demo import converted_checkpoint, missing_packages
    from stemma.native.library import report_kernels

    engine = settings.engine
    memory, folder = machine.memory(), examine_folder(cache_folder())
    kernels = report_kernels(engine.model.isa)
    tiers = storage.examine_tiers(engine.tiers, engine.cache.pool)
    problems = tiers.problems(memory.free_bytes)
    if folder.problem is not None:
        problems.append(f"cache folder: {folder.problem}; each process compiles the kernels again")
    if kernels.level is None:
        problems.append(f"no kernels: {kernels.reason}; everything runs on torch, at about half the speed")
    gpu = machine.gpu()
    for number, card in enumerate(gpu.cards):
        problems += [f"GPU {number}: {problem}" for problem in card.problems]
    model = examine_model(engine) if names_model else None
    problems += [] if model is None else [f"{model.name}: {problem}" for problem in model.problems]
    checkpoint = converted_checkpoint()
    return Report(
        machine.versions(),
        machine.processor(),
        kernels,
        machine.threads(engine.model.num_threads),
        memory,
        gpu,
        folder,
        tiers,
        DemoStatus(tuple(missing_packages()), None if checkpoint is None else str(checkpoint)),
        model,
        problems,
    )


def describe(report: Report) -> list[str]:
    """Return the report as lines with rich's markup."""
    processor, kernels, memory = report.processor, report.kernels, report.memory
    quota = "" if processor.quota_cores is None else f", container limit {processor.quota_cores:g}"
    compiler = "none found" if kernels.compiler is None else kernels.compiler.version
    origin = "" if kernels.path is None else f" ({kernels.origin}: {kernels.path})"
    resident = "" if memory.resident_bytes is None else f", this process {format_size(memory.resident_bytes)}"
    environment = "".join(f", {name}={value}" for name, value in report.threads.environment.items())
    rows = [
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
        ("processor", f"{processor.name}, {processor.architecture}"),
        ("cores", f"{processor.num_cores}, usable {processor.num_usable_cores}{quota}"),
        ("features", " ".join(kernels.features) or "none that kernels use"),
        ("kernels", f"{kernels.level or 'none'}: {kernels.reason}{origin}"),
        ("levels here", _levels_line(kernels)),
        ("int8 products", kernels.int8_products),
        ("compiler", compiler),
        ("threads", f"{report.threads.num_threads} ({report.threads.origin}){environment}"),
        ("memory", f"{format_size(memory.total_bytes)}, free {format_size(memory.free_bytes)}{resident}"),
        ("GPU", _gpu_line(report.gpu)),
        *((f"GPU {number}", card.text) for number, card in enumerate(report.gpu.cards)),
        ("cache folder", _folder_line(report.cache_folder)),
        *tier_rows(report.tiers),
        ("demo model", _demo_line(report.demo)),
        *([] if report.model is None else [("model", _model_line(report.model))]),
    ]
    return described(rows, report.problems)


def described(rows: Iterable[tuple[str, str]], problems: Sequence[str]) -> list[str]:
    """Return rows, and what is wrong, as lines with rich's markup."""
    lines = [f"[bold]{name:<13}[/] {escape(text)}" for name, text in rows]
    if not problems:
        return [*lines, "[green]nothing is wrong[/]"]
    return [*lines, *(f"[red]wrong:[/] {escape(problem)}" for problem in problems)]


def _url(given: Path | None) -> str | None:
    """Return the URL that stands where a model may; a path has one of its slashes only."""
    scheme, separator, rest = str(given).partition(":/")
    return f"{scheme}://{rest.lstrip('/')}" if separator and scheme in ("http", "https") else None


def _settings(config: Path | None, flags: dict[str, Any]) -> tuple[Settings, bool]:
    """Load the settings, and whether they name a model; they needn't."""
    try:
        return load_settings(file=config, environ=os.environ, flags=flags), True
    except ConfigError:
        if flags.get("model") is not None:
            raise
        return load_settings(file=config, environ=os.environ, flags={**flags, "model": "demo"}), False


def _model_line(model: NamedModel) -> str:
    if model.architecture is None or model.weight_bytes is None:
        return f"{model.name}: {model.problems[0]}"
    size = format_size(model.weight_bytes)
    return f"{model.name}: {model.architecture}, {model.max_model_len} tokens, {size} of weights"


def _levels_line(kernels: KernelReport) -> str:
    highest = f"{', '.join(kernels.levels)}: highest of this processor {kernels.levels[-1]}"
    return f"{highest}, of this wheel {kernels.wheel_levels[-1]}" if kernels.wheel_levels else highest


def _gpu_line(gpu: Gpu) -> str:
    if gpu.names:
        return f"{', '.join(gpu.names)} (CUDA {gpu.cuda_version}; {gpu.state})"
    built = "without CUDA" if gpu.cuda_version is None else f"with CUDA {gpu.cuda_version}"
    return f"none; torch is built {built}; {gpu.state}"


def _folder_line(folder: Folder) -> str:
    if folder.problem is not None or folder.free_bytes is None:
        return f"{folder.path}: {folder.problem}"
    return f"{folder.path}, writable, {format_size(folder.free_bytes)} free"


def tier_rows(tiers: Tiers) -> list[tuple[str, str]]:
    """Return what there is below the device, by name."""
    host = "off" if tiers.host_bytes is None else format_size(tiers.host_bytes)
    disk, pool = "off", "off"
    if tiers.disk is not None:
        disk = (
            f"{_folder_line(tiers.disk.folder)}; limit {format_size(tiers.disk.limit_bytes)}, "
            f"{tiers.disk.num_caches} caches of {format_size(tiers.disk.cache_bytes)}{tiers.disk.held.note}, "
            f"{tiers.disk.num_in_use} in use"
        )
    if tiers.pool is not None:
        pool = f"{tiers.pool.name}, {tiers.pool.problem or 'answers'}"
        if ports := tiers.pool.ports_open_to_all:
            now = ", ".join(map(str, ports))
            pool += (
                f"; its client listens on all interfaces (ports {now} now, others each time): "
                "let a firewall keep them to the pool's network"
            )
    return [("host tier", host), ("disk tier", disk), ("pool", pool)]


def _demo_line(demo: DemoStatus) -> str:
    if demo.missing_packages:
        return f"random weights: {' and '.join(demo.missing_packages)} not installed"
    return demo.checkpoint or "installed; converted on first use"
