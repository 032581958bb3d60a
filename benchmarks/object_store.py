"""Checkpoint-sized objects between memory and an S3 server: ours beside boto3, TransferManager, s5cmd and s3fs.

Ours is what a save and a load run: `transfer.upload` and the reader's chunks, hashed on the way up and verified on the
way down. The others move the same bytes unhashed. All talk to the same server, in turn in every repetition, from and to
shared memory. Without `--endpoint` (with the usual AWS_* credentials) a server is started: Ceph where it is installed,
else moto, which shows that all works but measures nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ceph
import numpy as np
from common import Claim, Spread, benchmark_parser, interleave, print_table, report
from object_peers import boto3_client, mapped

from flextrain.checkpoint.chunks import Chunks, Parts, Target
from flextrain.checkpoint.manifest import ObjectEntry
from flextrain.checkpoint.transfer import upload
from flextrain.storage import open_store

HERE = Path(__file__).parent
GOAL = ">= 95"  # % of the best other
OWN_TARGETS = ("ours", "boto3")
Times = dict[str, float]  # seconds by way


class Ours:
    """The engine, between the same files as the others, mapped."""

    def __init__(self, folder: Path, bucket: str, objects: int) -> None:
        self._store = open_store(f"s3://{bucket}/ours")
        self._sources = [mapped(folder / f"source-{k}") for k in range(objects)]
        self._targets = [mapped(folder / f"ours-{k}") for k in range(objects)]
        self._entries: dict[str, ObjectEntry] = {}

    def up(self) -> None:
        for k, source in enumerate(self._sources):
            self._entries[f"{k}"] = upload(self._store, f"{k}", source, len(source))

    def down(self) -> None:
        for (name, entry), target in zip(self._entries.items(), self._targets, strict=True):
            parts = Parts([Target(0, len(target), np.frombuffer(target, np.uint8))])
            with Chunks(self._store, name, entry) as chunks:
                chunks.scatter(parts, list(parts))


class Peers:
    """The process that runs the others."""

    def __init__(self, python: str, folder: Path, bucket: str, objects: int) -> None:
        command = [python, str(HERE / "object_peers.py"), str(folder), bucket, str(objects)]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
        answer = self._answer()
        self.names: list[str] = answer["found"]
        for name, reason in answer["absent"].items():
            print(f"without {name}: {reason}")

    def move(self, name: str, way: str) -> float:
        assert self._process.stdin
        print(name, way, file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of the others ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def fill(folder: Path, objects: int, size_bytes: int) -> None:
    """Sources with noise, and targets of the same size with every page there. Those of ours and of boto3 stay mapped;
    the others may put new files in the place of theirs."""
    noise = os.urandom(1 << 20)
    for k in range(objects):
        for name in ("source", "target", *OWN_TARGETS):
            with (folder / f"{name}-{k}").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                for start in range(0, size_bytes if name == "source" else 0, len(noise)):
                    file.write(noise[start % 251 :][: size_bytes - start] + noise[: start % 251])
                file.truncate(size_bytes)


def checked(targets: list[Path], up: Callable[[], float], down: Callable[[], float]) -> Times:
    """Seconds there and back; fails unless all came back as it was."""
    seconds = {"up": up()}
    for target in targets:
        np.frombuffer(mapped(target), np.uint8)[:] = 0
    seconds["down"] = down()
    for target in targets:
        if mapped(target) != mapped(target.with_name(f"source-{target.name.rpartition('-')[2]}")):
            raise SystemExit(f"{target.name} is not what was sent")
    return seconds


def timed(move: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    move()
    return time.perf_counter() - began_s


def measure(folder: Path, bucket: str, args: Any) -> dict[str, list[Times]]:
    size_bytes = args.object_mb << 20
    fill(folder, args.objects, size_bytes)
    ours, peers = Ours(folder, bucket, args.objects), Peers(args.peers_python, folder, bucket, args.objects)

    def body(name: str) -> Times:
        prefix = name if name in OWN_TARGETS else "target"
        targets = [folder / f"{prefix}-{k}" for k in range(args.objects)]
        if name == "ours":
            return checked(targets, lambda: timed(ours.up), lambda: timed(ours.down))
        return checked(targets, lambda: peers.move(name, "up"), lambda: peers.move(name, "down"))

    bodies = {name: partial(body, name) for name in ("ours", *peers.names)}
    try:
        for first in bodies.values():  # connections, pools, and whatever the server does once
            first()
        return interleave(bodies, args.repetitions)
    finally:
        peers.close()


def claims_of(results: dict[str, list[Times]], size_bytes: int) -> list[Claim]:
    rows, claims = [], []
    rates = {
        way: {name: Spread.of([size_bytes / 1e6 / times[way] for times in runs]) for name, runs in results.items()}
        for way in ("up", "down")
    }
    for name in results:
        cells = [
            f"{value:,.0f}" for way in rates.values() for value in (way[name].median, way[name].low, way[name].high)
        ]
        rows.append([name, *cells])
    print_table(["MB/s", "up", "slowest", "fastest", "down", "slowest", "fastest"], rows)
    for way, rate in rates.items():
        others = {name: spread.median for name, spread in rate.items() if name != "ours"}
        claims += [Claim(f"{way}: {name}", spread.median, "MB/s") for name, spread in rate.items()]
        if others:
            best = max(others, key=others.__getitem__)
            claims.append(
                Claim(f"{way}: ours, of the best other ({best})", 100 * rate["ours"].median / others[best], "%", GOAL)
            )
    return claims


def remove(bucket: str) -> None:
    store = open_store(f"s3://{bucket}")
    store.delete(entry.key for entry in store.list())
    boto3_client().delete_bucket(Bucket=bucket)


@contextmanager
def server(endpoint: str | None, disk_bytes: int, folder: str | None) -> Iterator[None]:
    """A server that AWS_* variables lead to."""
    if endpoint:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        print(f"server: {endpoint}")
        yield
        return
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = ceph.ACCESS_KEY, ceph.SECRET_KEY
    if absent := ceph.missing_programs():
        from moto.server import ThreadedMotoServer

        print(f"WARNING: no {', '.join(absent)}; moto stands in, a server for tests: these numbers measure nothing")
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        moto.start()
        os.environ["AWS_ENDPOINT_URL"] = "http://{}:{}".format(*moto.get_host_and_port())
        yield
        moto.stop()
        return
    with ceph.running(disk_bytes, Path(folder) if folder else None) as url:
        os.environ["AWS_ENDPOINT_URL"] = url
        print(f"server: {ceph.version()}, gateway, monitor and one disk on this machine")
        yield


def main(argv: list[str] | None = None) -> int:
    parser = benchmark_parser(__doc__ or "")
    parser.set_defaults(repetitions=5)
    parser.add_argument("--endpoint", metavar="URL", help="an S3 server that runs already")
    parser.add_argument("--objects", type=int, default=2, metavar="N", help="one per rank (default 2)")
    parser.add_argument("--object-mb", type=int, default=512, metavar="MiB", help="of each (default 512)")
    parser.add_argument(
        "--peers-python", default=sys.executable, metavar="PYTHON", help="that has the others installed"
    )
    parser.add_argument("--folder", metavar="DIR", help="on the disk for Ceph (default: the system's temporary one)")
    args = parser.parse_args(argv)
    size_bytes = args.objects * args.object_mb << 20
    print(f"{args.objects} x {args.object_mb} MiB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    with server(args.endpoint, 16 * size_bytes, args.folder), tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        bucket = f"benchmark-{uuid.uuid4().hex[:12]}"
        boto3_client().create_bucket(Bucket=bucket)
        results = measure(Path(memory), bucket, args)
        if args.endpoint:
            remove(bucket)
    report(claims_of(results, size_bytes), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
