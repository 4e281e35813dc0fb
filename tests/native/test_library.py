"""Instruction-set levels: chosen, found, compiled, and life without them."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stemma.errors import ConfigError
from stemma.native import building, compiling, levels, library
from stemma.native.building import build, find_or_build, library_name
from stemma.native.compiling import SOURCES, UNITS, BuildFailed
from stemma.native.levels import LEVELS, available_levels, choose_level, level_named, missing_features
from stemma.native.library import drop_kernels, load_kernels, missed_level, report_kernels
from stemma.native.structures import LAYOUTS

PORTABLE = level_named("portable")

needs_compiler = pytest.mark.skipif(building.find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def _no_level_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(levels.ISA_VARIABLE, raising=False)
    monkeypatch.delenv("STEMMA_NATIVE", raising=False)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and no library remembered from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "PREBUILT", tmp_path / "prebuilt")
    drop_kernels()
    yield tmp_path / "stemma"
    drop_kernels()


@pytest.fixture
def quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A "compiler" whose output is always the portable library, compiled before."""
    ready = find_or_build(PORTABLE).path
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo quick 1.0 && exit\n'
        f'for last; do :; done\ncp "{ready}" "$last"\n'
    )
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    return script


def processor_with(monkeypatch: pytest.MonkeyPatch, *features: str, machine: str = "x86_64") -> None:
    monkeypatch.setattr(levels, "processor_features", lambda: frozenset(features))
    monkeypatch.setattr(platform, "machine", lambda: machine)


def test_the_highest_level_of_the_processor_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in LEVELS:
        machine = "aarch64" if level.architecture == "arm64" else "x86_64"
        processor_with(monkeypatch, *level.features, "sse2", machine=machine)
        assert choose_level().level is level
        assert [other.name for other in available_levels()][-1] == level.name


def test_other_processors_are_portable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert choose_level().level is PORTABLE


def test_a_level_runs_on_its_own_architecture_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {feature for level in LEVELS for feature in level.features}
    processor_with(monkeypatch, *features, machine="arm64")
    assert [level.name for level in available_levels()] == ["portable", "neon", "neon_bf16"]
    processor_with(monkeypatch, *features, machine="AMD64")
    assert [level.name for level in available_levels()] == [
        "portable",
        "avx2",
        "avx512",
        "avx512_bf16",
        "amx",
    ]


def test_setting_beats_environment_beats_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    processor_with(monkeypatch, *level_named("avx512").features)
    monkeypatch.setenv(levels.ISA_VARIABLE, "avx2")
    assert choose_level().level.name == "avx2"
    assert choose_level("portable").level is PORTABLE
    monkeypatch.setenv(levels.ISA_VARIABLE, "auto")
    assert choose_level().level.name == "avx512"


def test_an_unknown_level_is_an_error_that_names_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(levels.ISA_VARIABLE, "sse9")
    with pytest.raises(
        ConfigError, match=r"'sse9'.*portable, neon, neon_bf16, avx2, avx512, avx512_bf16, amx"
    ):
        load_kernels()


def test_a_level_too_high_is_an_error_that_names_what_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    processor_with(monkeypatch, *level_named("avx2").features)
    with pytest.raises(ConfigError, match=r"the setting isa asks for avx512, .* lacks avx512f.* is avx2"):
        load_kernels("avx512")


def test_switched_off(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEMMA_NATIVE", "0")
    assert load_kernels() is None
    assert "STEMMA_NATIVE" in report_kernels().reason
    assert not fresh_cache.exists()


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler", "/bin/true"])
def test_a_broken_compiler_is_no_failure(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    """Building fails, is reported once, and leaves nothing behind."""
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert load_kernels() is None
        assert load_kernels() is None
    assert len(caplog.records) == 1
    assert "everything runs on torch" in caplog.text
    assert not list(fresh_cache.iterdir())


def test_without_a_compiler_one_line_says_what_is_lost(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert load_kernels() is None
        assert report_kernels().level is None
    assert [record.message.count("no C++ compiler found") for record in caplog.records] == [1]


@needs_compiler
@pytest.mark.usefixtures("quick_compiler", "fresh_cache")
def test_prebuilt_then_cached_then_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = find_or_build(PORTABLE)
    assert compiled.origin == "compiled"
    cached = find_or_build(PORTABLE)
    assert (cached.origin, cached.path) == ("cached", compiled.path)
    prebuilt = building.PREBUILT
    prebuilt.mkdir()
    compiled.path.rename(prebuilt / library_name(PORTABLE))
    monkeypatch.setattr(building, "find_compiler", lambda: None)
    assert find_or_build(PORTABLE).origin == "prebuilt"
    (prebuilt / library_name(PORTABLE)).rename(compiled.path)
    assert find_or_build(PORTABLE).origin == "cached"  # whichever compiler made it
    compiled.path.unlink()
    with pytest.raises(BuildFailed, match="no C\\+\\+ compiler"):
        find_or_build(PORTABLE)


@needs_compiler
@pytest.mark.usefixtures("quick_compiler")
def test_a_wheel_builds_what_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "PREBUILT", tmp_path / "prebuilt")
    [path] = build([PORTABLE], building.PREBUILT)
    assert find_or_build(PORTABLE).path == path
    assert [file.name for file in building.PREBUILT.iterdir()] == [path.name]


@needs_compiler
@pytest.mark.usefixtures("quick_compiler", "fresh_cache")
def test_a_level_that_cannot_be_built_gives_way_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old compiler doesn't know the newest instructions."""
    highest = available_levels()[-1]
    real = building.find_or_build

    def old_compiler(level: levels.Level) -> building.Library:
        if level is not PORTABLE:
            raise BuildFailed("unknown option")
        return real(level)

    monkeypatch.setattr(library, "find_or_build", old_compiler)
    kernels = load_kernels()
    assert kernels is not None
    assert kernels.level == "portable"
    if highest is not PORTABLE:
        assert "unknown option" in report_kernels().reason
        assert load_kernels(highest.name) is None


@needs_compiler
@pytest.mark.usefixtures("fresh_cache")
def test_structures_are_compared_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose GateArgs has one field in another place don't compile, and the report says why."""
    changed = re.sub(r"(GateArgs, output\) == )8", r"\g<1>16", LAYOUTS)
    assert changed != LAYOUTS
    monkeypatch.setattr(compiling, "LAYOUTS", changed)
    assert load_kernels(PORTABLE.name) is None
    assert "structures.py reads GateArgs otherwise" in report_kernels(PORTABLE.name).reason


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_every_level_of_this_machine_loads(level: levels.Level) -> None:
    missing = missing_features(level)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    if building.find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    report = report_kernels(level.name)
    assert report.level == level.name
    assert report.path is not None


COUNTING = """#!/bin/sh
[ "$1" = --version ] && echo counting 1.0 && exit
for last; do :; done
echo "$last" >> "{log}"
case "$last" in *.so) cp "{ready}" "$last";; *) sleep 0.2; echo part > "$last";; esac
"""
PREPARE = "from stemma.native.library import prepare_kernels; prepare_kernels('portable')"


@pytest.fixture
def counting_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A "compiler" of the portable library; returns the file that names what it made."""
    ready, log, script = find_or_build(PORTABLE).path, tmp_path / "made", tmp_path / "counting"
    script.write_text(COUNTING.format(ready=ready, log=log))
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    return log


def prepare_in_process(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE],
        env={**os.environ, "XDG_CACHE_HOME": str(cache.parent), "PYTHONPATH": str(SOURCES.parents[1])},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_every_source_is_a_unit() -> None:
    assert {path.stem for path in SOURCES.glob("*.cpp")} == set(UNITS)


@needs_compiler
def test_what_is_compiled_is_said_once(counting_compiler: Path, fresh_cache: Path) -> None:
    """In a pipe: a line that says what, why and how long, one for each part, and the end; then nothing."""
    _, said = prepare_in_process(fresh_cache).communicate(timeout=60)
    first, *parts, last = said.splitlines()
    assert re.search(
        r"^Compiling the CPU kernels for portable.*no library of these sources.*About \d+ s", first
    )
    assert [line.split(" after")[0] for line in parts] == [
        f"kernels: {n} of {len(UNITS)} parts compiled" for n in range(1, len(UNITS) + 1)
    ]
    assert "are compiled" in last
    assert prepare_in_process(fresh_cache).communicate(timeout=60)[1] == ""


@needs_compiler
def test_processes_that_start_at_once_compile_once(counting_compiler: Path, fresh_cache: Path) -> None:
    both = [prepare_in_process(fresh_cache) for _ in range(2)]
    said = sorted(process.communicate(timeout=60)[1].splitlines()[0] for process in both)
    assert "waiting" in said[0]
    assert "Compiling" in said[1]
    assert len(counting_compiler.read_text().splitlines()) == len(UNITS) + 1
    assert [path.suffix for path in fresh_cache.iterdir()] == [".so"]


@needs_compiler
def test_what_a_killed_build_left_is_removed(counting_compiler: Path, fresh_cache: Path) -> None:
    killed = prepare_in_process(fresh_cache)
    assert killed.stderr is not None
    killed.stderr.readline()
    killed.stderr.readline()
    killed.kill()
    killed.wait()
    assert {path.name.partition("-")[0] for path in fresh_cache.iterdir()} == {"building", "parts"}
    assert find_or_build(PORTABLE).origin == "compiled"
    assert [path.suffix for path in fresh_cache.iterdir()] == [".so"]


def compiler_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, on_kernels: str, else_: str) -> None:
    script = tmp_path / "failing"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo counting 1.0 && exit\nfor last; do :; done\n'
        f'case "$*" in *kernels.cpp*) {on_kernels};; esac\n{else_}\n'
    )
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))


FAIL = 'echo "no such instruction" >&2; exit 1'


@needs_compiler
def test_a_unit_that_fails_stops_the_others(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_that(tmp_path, monkeypatch, on_kernels=FAIL, else_="exec sleep 60")
    with pytest.raises(BuildFailed, match="no such instruction"):
        find_or_build(PORTABLE)
    assert not list(fresh_cache.iterdir())


@needs_compiler
def test_what_was_compiled_is_kept_when_a_unit_fails(
    counting_compiler: Path, fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = os.environ["CXX"]
    compiler_that(tmp_path, monkeypatch, on_kernels=f"sleep 2; {FAIL}", else_='echo part > "$last"')
    with pytest.raises(BuildFailed, match="no such instruction"):
        find_or_build(PORTABLE)
    monkeypatch.setenv("CXX", good)
    assert find_or_build(PORTABLE).origin == "compiled"
    unit, library = (Path(line) for line in counting_compiler.read_text().splitlines())
    assert (unit.name, library.suffix) == ("kernels.o", ".so")
    assert [path.suffix for path in fresh_cache.iterdir()] == [".so"]


@needs_compiler
@pytest.mark.usefixtures("fresh_cache")
def test_a_compilers_processor_time_is_bounded_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MOST_CPU_S", 1)
    compiler_that(
        tmp_path, monkeypatch, on_kernels="while :; do :; done", else_='sleep 2; echo part > "$last"'
    )
    with pytest.raises(BuildFailed, match=f"ended with -{signal.SIGXCPU.value}"):
        find_or_build(PORTABLE)


@needs_compiler
def test_what_make_compiles_ahead_is_only_linked(counting_compiler: Path, fresh_cache: Path) -> None:
    building.build_ahead(PORTABLE)
    assert {Path(line).stem for line in counting_compiler.read_text().splitlines()} == set(UNITS)
    counting_compiler.write_text("")
    assert find_or_build(PORTABLE).origin == "compiled"
    assert [Path(line).suffix for line in counting_compiler.read_text().splitlines()] == [".so"]
    building.build_ahead(PORTABLE)
    assert [path.suffix for path in fresh_cache.iterdir()] == [".so"]


@needs_compiler
def test_compiling_ahead_needs_no_package(counting_compiler: Path, fresh_cache: Path) -> None:
    """As `make` does before pip has installed any."""
    subprocess.run(
        [sys.executable, "-S", "-m", "stemma.native.ahead"],
        env=os.environ | {"PYTHONPATH": str(SOURCES.parents[1]), "STEMMA_ISA": "portable"},
        check=True,
        timeout=60,
    )
    [parts] = fresh_cache.iterdir()
    assert {path.stem for path in parts.iterdir()} == set(UNITS)


@needs_compiler
@pytest.mark.usefixtures("quick_compiler", "fresh_cache")
def test_a_wheel_of_lower_levels_says_what_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    highest = available_levels()[-1]
    if highest is PORTABLE:
        pytest.skip("needs a processor with another level than portable")
    build([PORTABLE], building.PREBUILT)
    monkeypatch.setattr(building, "find_compiler", lambda: None)
    report = report_kernels()
    assert report.wheel_levels == ("portable",)
    assert report.level == "portable"
    assert f"the highest level that this wheel has; this processor has {highest.name}" in report.reason
    assert missed_level() == highest.name
    assert missed_level("portable") is None
