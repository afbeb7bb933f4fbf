"""Send bytes over one TCP connection between two hosts; run as a program, without torch.

    python bulk_transfer.py receive <address> <port>
    python bulk_transfer.py send <address> <port> <number of bytes>

The receiver prints a line when it listens, and at the end the bytes it received and when it had
the last; the sender prints when it began. Both in seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import socket
import sys
import time

_CHUNK_BYTES = 1 << 20


def receive(address: str, port: int) -> None:
    with socket.create_server((address, port)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            received = 0
            while chunk := connection.recv(_CHUNK_BYTES):
                received += len(chunk)
            print(received, time.monotonic(), flush=True)


def send(address: str, port: int, num_bytes: int) -> None:
    chunk = bytes(_CHUNK_BYTES)
    with socket.create_connection((address, port)) as connection:
        print(time.monotonic())
        for start in range(0, num_bytes, _CHUNK_BYTES):
            connection.sendall(chunk[: num_bytes - start])


if __name__ == "__main__":
    action, address, port, *rest = sys.argv[1:]
    if action == "receive":
        receive(address, int(port))
    else:
        send(address, int(port), int(rest[0]))
