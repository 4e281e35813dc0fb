"""A server of a few lines that answers as `/mode/NAME` told it: well, badly, or not at all."""

from __future__ import annotations

import asyncio
import json
import os

JSON = "application/json"
SSE = "text/event-stream"
BIG_BYTES = 16 * 2**20
RESETS = ("reset", "cut")


def answer(status: int, content: bytes, kind: str = JSON) -> bytes:
    head = f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def chunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return body


class SickServer:
    def __init__(self) -> None:
        self.mode = "well"
        self.num_generated = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                path = head.split(" ")[1]
                length = head.lower().partition("content-length:")[2].split("\r\n")[0]
                is_chunked = "transfer-encoding: chunked" in head.lower()
                body = await (chunked(reader) if is_chunked else reader.readexactly(int(length or 0)))
                if path.startswith("/mode/"):
                    self.mode = path.removeprefix("/mode/")
                    writer.write(answer(200, json.dumps({"generated": self.num_generated}).encode()))
                elif path == "/health":
                    told = b'{"decode_s_per_token": 0.001}'
                    writer.write(answer(503 if self.mode == "draining" else 200, told))
                elif path == "/v1/models":
                    writer.write(answer(401 if self.mode == "401" else 200, b"{}"))
                elif path == "/tokenize":
                    writer.write(answer(404, b"{}"))
                elif "content-encoding: gzip" in head.lower():
                    writer.write(answer(415, b"{}"))
                elif not await self.generate(writer, json.loads(body or b"{}")):
                    break
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def generate(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> bool:
        """Answer; return whether the connection stays."""
        self.num_generated += 1
        usage = {"completion_tokens": 4}
        length = len(str(body.get("prompt")))
        said = json.dumps({"pid": os.getpid(), "length": length, "usage": usage}).encode()
        streams = bool(body.get("stream"))
        if self.mode in ("500", "401", "429", "502", "503"):
            writer.write(answer(int(self.mode), b'{"error": {}}'))
        elif self.mode == "draining":
            writer.write(answer(503, b'{"error": {}}'))
        elif self.mode == "html":
            writer.write(answer(200, b"<html>It works!</html>", SSE if streams else "text/html"))
        elif self.mode == "empty":
            writer.write(answer(200, b"", SSE if streams else JSON))
        elif self.mode == "garbage":
            writer.write(os.urandom(200))
            return False
        elif self.mode == "reset":
            return False
        elif self.mode == "hang":
            await asyncio.sleep(3600)
        elif self.mode.startswith("big"):
            content = b'{"text": "' + b"x" * BIG_BYTES + b'"}'
            writer.write(answer(200, content)[: -BIG_BYTES // 4 if self.mode == "big-cut" else None])
            return self.mode == "big"
        elif streams:
            await asyncio.sleep(0.002)
            writer.write(f"HTTP/1.1 200 x\r\ncontent-type: {SSE}\r\nconnection: close\r\n\r\n".encode())
            for _ in range(3):
                writer.write(b"data: " + said + b"\n\n")
                await writer.drain()
                await asyncio.sleep(float(str(body.get("pause", 0))))
            return False
        else:
            await asyncio.sleep(1.0 if self.mode == "slow" else float(str(body.get("pause", 0.002))))
            rest = b" " * int(str(body.get("answer_bytes", 0)))
            writer.write(answer(200, said + rest))
        return True


async def main() -> None:
    server = await asyncio.start_server(SickServer().serve, "127.0.0.1", 0)
    print(f"Ready: http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
