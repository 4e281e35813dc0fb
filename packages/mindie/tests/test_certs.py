"""``stemma certs dev``: the files of MindIE's defaults and curl's, and that they fit each other."""

from __future__ import annotations

import stat
from pathlib import Path

from typer.testing import CliRunner

from stemma.cli import GUESTS, load_command, make_app
from stemma.config.server_settings import TLSSettings
from stemma.errors import ConfigError
from stemma.server.transport.tls import load_context
from stemma_mindie.commands import COMMANDS


def test_the_core_says_that_the_command_comes_with_this_package() -> None:
    assert GUESTS["stemma-mindie"] == tuple(COMMANDS)
    assert load_command("certs").help == COMMANDS["certs"][1]


def test_dev_certificates_lie_where_mindie_looks_and_load(tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(), ["certs", "dev", str(tmp_path), "--host", "box.local"])

    assert result.exit_code == 0, result.output
    for plane, ca in (("", "ca.pem"), ("management/", "management_ca.pem"), ("metrics/", "metrics_ca.pem")):
        key = tmp_path / f"security/keys/{plane}server.key.pem"
        load_context(
            TLSSettings(
                cert=tmp_path / f"security/certs/{plane}server.pem",
                key=key,
                key_password_file=tmp_path / f"security/pass/{plane}key_pwd.txt",
                ca=(tmp_path / f"security/{plane}ca/{ca}",),
                crl=(tmp_path / f"security/{plane}certs/server_crl.pem",),
            )
        )
        assert b"ENCRYPTED" in key.read_bytes()
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "client.key.pem").stat().st_mode) == 0o600


def test_files_are_not_overwritten_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("mine")
    refused = CliRunner().invoke(make_app(), ["certs", "dev", str(tmp_path)])

    assert isinstance(refused.exception, ConfigError)
    assert (tmp_path / "ca.pem").read_text() == "mine"
    assert not (tmp_path / "security").exists()
    assert CliRunner().invoke(make_app(), ["certs", "dev", str(tmp_path), "--force"]).exit_code == 0
    assert (tmp_path / "ca.pem").read_text().startswith("-----BEGIN CERTIFICATE")
