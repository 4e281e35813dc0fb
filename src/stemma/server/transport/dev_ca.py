"""A certificate authority for development: server and client certificates, revocation lists."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 397
"""Longer than this, some clients refuse a server's certificate."""
_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, both PEM."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """The certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self, passphrase: bytes | None = None) -> bytes:
        """Return the key, encrypted if there is a passphrase."""
        encryption = (
            serialization.NoEncryption()
            if passphrase is None
            else serialization.BestAvailableEncryption(passphrase)
        )
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )


class DevCA:
    """Signs certificates with a key that lives only in this object."""

    def __init__(self, name: str = "Stemma development CA") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        # The number keeps two authorities apart for clients that know both.
        self._name = _named(f"{name} {secrets.token_hex(4)}")
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(sign=False), critical=True)
        self.certificate = builder.sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> bytes:
        """The authority's own certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue_server(self, hosts: Sequence[str]) -> Issued:
        """Return a certificate for a server that is reached under `hosts`, names or addresses."""
        return self._issue(hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, hosts)

    def issue_client(self, name: str) -> Issued:
        """Return a certificate that a client presents."""
        return self._issue(name, ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def revocation_list(self, revoked: Sequence[x509.Certificate] = ()) -> bytes:
        """Return a list, PEM, that names `revoked`."""
        now = datetime.now(UTC)
        builder = x509.CertificateRevocationListBuilder(
            self._name, last_update=now - _CLOCK_SKEW, next_update=now + timedelta(days=VALID_DAYS)
        )
        for certificate in revoked:
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder(certificate.serial_number, now - _CLOCK_SKEW).build()
            )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _issue(self, name: str, usage: x509.ObjectIdentifier, hosts: Sequence[str]) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_named(name), key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(sign=True), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return Issued(builder.sign(self._key, hashes.SHA256()), key)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            self._name,
            subject,
            key,
            x509.random_serial_number(),
            now - _CLOCK_SKEW,
            now + timedelta(days=VALID_DAYS),
        )
        of_key = x509.SubjectKeyIdentifier.from_public_key(key)
        of_signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return builder.add_extension(of_key, critical=False).add_extension(of_signer, critical=False)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, sign: bool) -> x509.KeyUsage:
    """Return what a key may do: sign a handshake, or certificates and their revocation."""
    return x509.KeyUsage(
        digital_signature=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=not sign,
        crl_sign=not sign,
        encipher_only=False,
        decipher_only=False,
    )
