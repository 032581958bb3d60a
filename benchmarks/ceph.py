"""A real S3 server on this machine: one monitor, one disk and one gateway of Ceph, for as long as a `with` lasts.

Debian and Ubuntu have what is needed: `apt install ceph-mon ceph-osd radosgw`. Nothing is installed or left behind, no
service is touched, and everything listens on 127.0.0.1 alone, without passwords between the daemons.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from flextrain.processes import die_with_parent

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
ACCESS_KEY = SECRET_KEY = "benchmark"
START_TIMEOUT_S = 120.0
# Deleted objects are cleared away at once, so that many repetitions need little disk. `ms_mon_client_mode`: the gateway
# insists on encryption with the monitor otherwise, which does not go without passwords.
CONFIG = """
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{mon_port}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
mon_data_avail_crit = 0
osd_crush_chooseleaf_type = 0
osd_class_update_on_start = false
bluestore_block_size = {disk_bytes}
osd_memory_target = 2147483648
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_gc_obj_min_wait = 5
rgw_gc_processor_period = 5
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
run_dir = {folder}
admin_socket =
log_file = {folder}/$name.log
"""


class Cluster:
    """Daemons and commands that share one configuration file."""

    def __init__(self, folder: Path, disk_bytes: int) -> None:
        self.folder, self.fsid = folder, str(uuid.uuid4())
        self.mon_port, self.port = _free_port(), _free_port()
        self._config = folder / "ceph.conf"
        places = {"fsid": self.fsid, "folder": folder, "mon_port": self.mon_port, "port": self.port}
        self._config.write_text(CONFIG.format(**places, disk_bytes=disk_bytes))
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()

    def call(self, *command: str) -> str:
        """Run a command to its end; raises CalledProcessError or TimeoutExpired."""
        place = ["-c", str(self._config)]
        return subprocess.run(
            [*command, *place], check=True, capture_output=True, text=True, timeout=START_TIMEOUT_S
        ).stdout

    @contextmanager
    def daemon(self, *command: str) -> Iterator[None]:
        with (self.folder / f"{command[0]}.out").open("wb") as out:
            full = [*command, "-f", "-c", str(self._config)]
            process = subprocess.Popen(full, stdout=out, stderr=out, preexec_fn=partial(die_with_parent, os.getpid()))
            try:
                yield
            finally:
                process.kill()
                process.wait()

    def start_monitor(self, stack: ExitStack) -> None:
        address = f"[v2:127.0.0.1:{self.mon_port}]"
        monmap = str(self.folder / "monmap")
        self.call("monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", address, monmap)
        self.call("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        stack.enter_context(self.daemon("ceph-mon", "-i", "a"))

    def start_disk(self, stack: ExitStack) -> None:
        disk = str(uuid.uuid4())
        self.call("ceph", "osd", "new", disk)
        self.call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        stack.enter_context(self.daemon("ceph-osd", "-i", "0"))
        self.call("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default")
        _await(lambda: json.loads(self.call("ceph", "osd", "stat", "--format", "json"))["num_up_osds"] == 1)

    def start_gateway(self, stack: ExitStack) -> str:
        user = ("--uid", "benchmark", "--display-name", "benchmark")
        self.call("radosgw-admin", "user", "create", *user, "--access-key", ACCESS_KEY, "--secret", SECRET_KEY)
        stack.enter_context(self.daemon("radosgw", "-n", "client.rgw.a"))
        endpoint = f"http://127.0.0.1:{self.port}"
        _await(lambda: urllib.request.urlopen(endpoint, timeout=5).status == 200)
        return endpoint


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if not shutil.which(name)]


@contextmanager
def running(disk_bytes: int, parent: Path | None = None) -> Iterator[str]:
    """The URL of a gateway with ACCESS_KEY and SECRET_KEY; its disk is a sparse file in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="ceph-", dir=parent) as folder, ExitStack() as stack:
        cluster = Cluster(Path(folder), disk_bytes)
        cluster.start_monitor(stack)
        cluster.start_disk(stack)
        yield cluster.start_gateway(stack)


def version() -> str:
    return subprocess.check_output(["radosgw", "--version"], text=True).split("(")[0].strip()


def _await(ready: Callable[[], bool]) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with suppress(OSError):  # refused as yet
            if ready():
                return
        if time.monotonic() > until_s:
            raise TimeoutError(f"Ceph has not started within {START_TIMEOUT_S:.0f} s")
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
