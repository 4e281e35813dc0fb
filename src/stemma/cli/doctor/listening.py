"""Sockets on which this process listens, as Linux tells in /proc."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc/self")
_LISTENS = "0A"
_EVERYWHERE = ("0.0.0.0", "::")


def ports_open_to_all() -> set[int]:
    """Return the ports on which this process listens on all interfaces; none where there is no /proc."""
    own = _own_inodes()
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for line in (_PROC / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                address, _, port = fields[1].partition(":")
                if fields[3] == _LISTENS and fields[9] in own and _address(address, family) in _EVERYWHERE:
                    found.add(int(port, 16))
    return found


def _own_inodes() -> set[str]:
    inodes = set()
    with suppress(OSError):
        for entry in (_PROC / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes


def _address(words: str, family: socket.AddressFamily) -> str:
    """Return an address that /proc writes as words of 32 bits in the machine's own order."""
    data = bytes.fromhex(words)
    swapped = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
    return socket.inet_ntop(family, swapped)
