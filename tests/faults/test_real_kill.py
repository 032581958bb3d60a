"""The whole thing, nothing replaced: a trainer killed at any time takes its writer process with it."""

import random
import subprocess
import sys
from pathlib import Path

from tests.support.forked import wait_for_end
from tests.support.seeds import seeded
from tests.support.subject import Subject

REAL = """
import sys
from tests.support.subject import Subject
subject = Subject(sys.argv[1], int(sys.argv[2]))
subject.saver.prepare()
print(subject.saver._writer.pid, flush=True)
for step in range(1, 1000):
    subject.become(step)
    for saved in subject.saver.snapshot(step, {"step": step}):
        print(saved.step, flush=True)
    subject.become(step + 5000)
"""


@seeded(6, sample=1)
def test_a_real_trainer_killed_at_any_time_takes_its_writer_with_it(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-c", REAL, str(tmp_path), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    writer = int(process.stdout.readline())
    target = random.Random(seed).randint(2, 20)
    newest = 0
    while newest < target:
        newest = int(process.stdout.readline())
    process.kill()
    heard = [newest, *map(int, process.stdout.read().split())]
    process.wait()
    wait_for_end(writer)
    subject = Subject(tmp_path, seed)
    subject.check()
    assert (subject.resume() or 0) >= max(heard)
    subject.close()
