"""Keys of receipts: Ed25519, in PEM files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from stemma.errors import ConfigError

_MAX_BYTES = 1 << 16


def make_key(path: Path) -> Path:
    """Write a new private key, readable by its owner alone, and its public key beside it; return that file.

    Raises ConfigError, also where either is there.
    """
    key, public = Ed25519PrivateKey.generate(), path.with_name(f"{path.name}.pub")
    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        for file, data, mode in ((public, public_pem(key.public_key()), 0o644), (path, content, 0o600)):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
    except OSError as error:
        raise ConfigError(f"can't write {error.filename or path}: {error.strerror}") from error
    return public


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in a file that nobody but its owner may read. Raises ConfigError."""
    content = _read(path)
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"others may read the key in {path}: chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no private key in PEM without a password: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"the key in {path} isn't of Ed25519: `stemma receipts-key {path}` makes one")
    return key


def read_public_key(path: Path) -> Ed25519PublicKey:
    """Return the public key in a PEM file, or in what `/v1/receipts/key` answered. Raises ConfigError."""
    raw = _read(path)
    try:
        if raw.lstrip().startswith(b"{"):
            raw = str(json.loads(raw)["public_key"]).encode()
        key = serialization.load_pem_public_key(raw)
    except (ValueError, KeyError, TypeError, RecursionError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no public key in PEM: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"the key in {path} isn't of Ed25519")
    return key


def public_pem(key: Ed25519PublicKey) -> bytes:
    """Return a public key as PEM."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def key_id(key: Ed25519PublicKey) -> str:
    """Return a key's name: the SHA-256 of its DER, in hexadecimal."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"can't read the key in {path}: {error.strerror}") from error
