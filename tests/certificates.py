"""Certificates for tests, by trustme; what it doesn't make stands here."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for localhost, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    kind = serialization.PrivateFormat.PKCS8
    key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption()))
    return cert_path, key_path


def encrypted(key: trustme.Blob, passphrase: bytes) -> bytes:
    """Return a private key as PEM that needs `passphrase`."""
    private = serialization.load_pem_private_key(key.bytes(), password=None)
    return private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase),
    )


def revocation_list(ca: trustme.CA, revoked: Sequence[trustme.LeafCert] = ()) -> bytes:
    """Return a list of the authority's, PEM, that names `revoked`."""
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    issuer = x509.load_pem_x509_certificate(ca.cert_pem.bytes()).subject
    builder = x509.CertificateRevocationListBuilder(issuer, last_update=now - hour, next_update=now + hour)
    for leaf in revoked:
        number = x509.load_pem_x509_certificate(leaf.cert_chain_pems[0].bytes()).serial_number
        builder = builder.add_revoked_certificate(x509.RevokedCertificateBuilder(number, now - hour).build())
    key = serialization.load_pem_private_key(ca.private_key_pem.bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
