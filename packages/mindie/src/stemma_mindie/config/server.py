"""``ServerConfig``: planes, ports, certificates, limits of a request."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from stemma_mindie.config.base import NO_LINK, NO_NPU, MindIESection, joint_key, key, no_effect

_Port = Annotated[int, Field(ge=1024, le=65535)]
_Path = Annotated[str, Field(max_length=4096)]
_CAFiles = Annotated[list[_Path], Field(min_length=1, max_length=3)]
_CRLFiles = Annotated[list[_Path], Field(max_length=3)]
_ANY_ADDRESS = ("0.0.0.0", "::")
_MANAGEMENT_PASS = "security/pass/management/key_pwd.txt"
_KMC = "passphrases are read from plain files"


class HealthCheckConfig(MindIESection):
    """How busy the device may be before it counts as unhealthy."""

    section: ClassVar[str] = "ServerConfig.HealthCheckConfig"

    npu_usage_threshold: int = no_effect(10, NO_NPU, ge=0, le=100)


class ServerConfig(MindIESection):
    """The HTTP planes."""

    section: ClassVar[str] = "ServerConfig"

    ip_address: str = key("127.0.0.1", "host")
    """Address of the business plane; MIES_CONTAINER_IP beats it."""
    management_ip_address: str = key("127.0.0.2", "management_host")
    """Address of the management and metrics planes; MIES_CONTAINER_MANAGEMENT_IP beats it."""
    port: _Port = key(1025, "port")
    """Business plane."""
    management_port: _Port = key(1026, "management_port")
    """Management plane. The same as `port` on the same address: one plane for both."""
    metrics_port: _Port = key(1027, "metrics_port")
    """Metrics plane."""
    allow_all_zero_ip_listening: bool = joint_key(False, "a check at the start")
    """Whether an address may be 0.0.0.0 or ::."""
    max_link_num: int = joint_key(1000, "max_waiting, max_connections", ge=1, le=4096)
    """Requests beyond three times this number, running and waiting, are refused;
    so many connections may be open."""
    max_request_length: int = key(40, "max_body_bytes", means=lambda count: count * 2**20, ge=1, le=100)
    """Largest request body, in MB (2^20 bytes)."""
    full_text_enabled: bool = no_effect(False, "streams carry new text only")
    token_timeout: int = no_effect(600, "a token that is late is waited for", ge=1, le=3600)
    e2e_timeout: int = key(600, "request_timeout_s", alias="e2eTimeout", ge=1, le=65535)
    """Seconds that a request may take."""
    open_ai_support: str = no_effect("vllm", "vLLM's fields are always taken")

    https_enabled: bool = joint_key(True, "tls_*, management_tls_*, metrics_tls_*")
    """HTTPS on all planes, and clients must present a certificate (mutual TLS)."""
    tls_ca_path: _Path = joint_key("security/ca/", "tls_ca")
    """Directory of `tlsCaFile`."""
    tls_ca_file: _CAFiles = joint_key(["ca.pem"], "tls_ca")
    """Certificates that sign the clients' certificates."""
    tls_cert: _Path = joint_key("security/certs/server.pem", "tls_cert")
    tls_pk: _Path = joint_key("security/keys/server.key.pem", "tls_key")
    tls_pk_pwd: _Path = joint_key("security/pass/key_pwd.txt", "tls_key_password_file")
    """File with the passphrase of an encrypted key; read only if the key is encrypted."""
    tls_crl_path: _Path = joint_key("security/certs/", "tls_crl")
    """Directory of `tlsCrlFiles`."""
    tls_crl_files: _CRLFiles = joint_key(["server_crl.pem"], "tls_crl")
    """Revoked certificates. The default file may be missing; a file that is named must be there."""
    kmc_ksf_master: _Path = no_effect("tools/pmt/master/ksfa", _KMC)
    kmc_ksf_standby: _Path = no_effect("tools/pmt/standby/ksfb", _KMC)

    management_tls_ca_path: _Path = joint_key("security/management/ca/", "management_tls_ca")
    management_tls_ca_file: _CAFiles = joint_key(["management_ca.pem"], "management_tls_ca")
    management_tls_cert: _Path = joint_key("security/certs/management/server.pem", "management_tls_cert")
    management_tls_pk: _Path = joint_key("security/keys/management/server.key.pem", "management_tls_key")
    management_tls_pk_pwd: _Path = joint_key(_MANAGEMENT_PASS, "management_tls_key_password_file")
    management_tls_crl_path: _Path = joint_key("security/management/certs/", "management_tls_crl")
    management_tls_crl_files: _CRLFiles = joint_key(["server_crl.pem"], "management_tls_crl")
    metrics_tls_ca_path: _Path = joint_key("security/metrics/ca/", "metrics_tls_ca")
    metrics_tls_ca_file: _CAFiles = joint_key(["metrics_ca.pem"], "metrics_tls_ca")
    metrics_tls_cert: _Path = joint_key("security/certs/metrics/server.pem", "metrics_tls_cert")
    metrics_tls_pk: _Path = joint_key("security/keys/metrics/server.key.pem", "metrics_tls_key")
    metrics_tls_pk_pwd: _Path = joint_key(
        "security/pass/metrics/key_pwd.txt", "metrics_tls_key_password_file"
    )
    metrics_tls_crl_path: _Path = joint_key("security/metrics/certs/", "metrics_tls_crl")
    metrics_tls_crl_files: _CRLFiles = joint_key(["server_crl.pem"], "metrics_tls_crl")

    infer_mode: Literal["standard", "dmi"] = joint_key("standard", "a check at the start")
    """`dmi` (prefill and decode apart) is refused with the file to write: `stemma cluster up` does it."""
    inter_comm_tls_enabled: bool = no_effect(True, NO_LINK, alias="interCommTLSEnabled")
    inter_comm_port: _Port = no_effect(1121, NO_LINK)
    inter_comm_tls_ca_path: _Path = no_effect("security/grpc/ca/", NO_LINK)
    inter_comm_tls_ca_files: _CAFiles = no_effect(["ca.pem"], NO_LINK)
    inter_comm_tls_cert: _Path = no_effect("security/grpc/certs/server.pem", NO_LINK)
    inter_comm_pk: _Path = no_effect("security/grpc/keys/server.key.pem", NO_LINK)
    inter_comm_pk_pwd: _Path = no_effect("security/grpc/pass/key_pwd.txt", NO_LINK)
    inter_comm_tls_crl_path: _Path = no_effect("security/grpc/certs/", NO_LINK)
    inter_comm_tls_crl_files: _CRLFiles = no_effect(["server_crl.pem"], NO_LINK)
    dist_dp_server_enabled: bool = no_effect(False, NO_LINK, alias="distDPServerEnabled")
    health_check: HealthCheckConfig = Field(default=HealthCheckConfig(), alias="HealthCheckConfig")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, address in (
            ("ipAddress", self.ip_address),
            ("managementIpAddress", self.management_ip_address),
        ):
            if address in _ANY_ADDRESS and not self.allow_all_zero_ip_listening:
                raise ValueError(f"{name} {address} needs allowAllZeroIpListening to be true")
        return self
