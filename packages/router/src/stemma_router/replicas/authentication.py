"""Whether a Ray that runs already asks for a token. Without one, whoever reaches it runs code there."""

from __future__ import annotations

import grpc

from stemma.errors import ConfigError

_TIMEOUT_S = 5.0
_ANY_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A method of Ray's control service that changes nothing."""
_HOW = (
    "start every node with RAY_AUTH_MODE=token and the same token (`ray get-auth-token --generate`; with "
    "KubeRay authOptions: {mode: token}), or give --insecure on a network of your own: docs/how-to/fleet.md"
)


def check_authentication(gcs_address: str) -> None:
    """Ask Ray's control service something without a token; raise ConfigError unless it refuses to answer.

    `gcs_address`: HOST:PORT, as Ray's runtime context has it.
    """
    options = (("grpc.enable_http_proxy", 0),)
    try:
        with grpc.insecure_channel(gcs_address, options=options) as channel:
            channel.unary_unary(_ANY_METHOD)(b"", timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return
        raise ConfigError(
            f"whether the Ray at {gcs_address} asks for a token can't be told ({error.code().name}): {_HOW}"
        ) from error
    raise ConfigError(f"the Ray at {gcs_address} asks for no token, so whoever reaches it runs code: {_HOW}")
